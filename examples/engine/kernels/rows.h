/* What a model does to rows beside attention and matrix products, in bf16. */
#ifndef ENGINE_ROWS_H
#define ENGINE_ROWS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct EngineRows {
    const void *from;     /* rows of width elements; of 2 * width for silu_mul */
    const void *other;    /* norm: [width] weights. gather: [rows] int32, a row of `from` each */
    void *to;             /* rows of width elements; argmax: [rows] int32 */
    int64_t from_stride;  /* elements from one row to the next */
    int64_t to_stride;
    int32_t rows, width;
    float eps;            /* of the norm */
} EngineRows;

typedef struct EngineRoute {
    const void *logits;   /* [rows, experts] */
    const void *bias;     /* [experts] */
    void *weights;        /* [rows, experts] */
    int32_t rows, experts; /* at most 256 experts */
    int32_t per_token;
    int32_t groups, groups_per_token;
    int32_t normalise;    /* 1: a row's weights add up to scale */
    float scale;
} EngineRoute;

typedef struct EngineAddWeighted {
    const void *from;     /* [experts, rows, width] */
    const void *weights;  /* [rows, experts] */
    void *to;             /* [rows, width], added to */
    int32_t rows, experts, width;
} EngineAddWeighted;

/* Each enqueues on `stream` (a CUstream) of the current context and returns a cudaError_t, 0 where it was launched. */
int32_t engine_norm(const EngineRows *rows, void *stream);
int32_t engine_add(const EngineRows *rows, void *stream);
int32_t engine_silu_mul(const EngineRows *rows, void *stream);
int32_t engine_gather(const EngineRows *rows, void *stream);
int32_t engine_argmax(const EngineRows *rows, void *stream);
int32_t engine_route(const EngineRoute *route, void *stream);
int32_t engine_add_weighted(const EngineAddWeighted *add, void *stream);

#ifdef __cplusplus
}
#endif

#endif
