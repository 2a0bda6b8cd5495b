/* FlashInfer's attention kernels by a C interface: plain structs of addresses, extents and strides.
 *
 * Every function returns 0, a cudaError_t above 0, or -1; fi_last_error() tells the last in words.
 * Strides count elements. A launch enqueues on `stream` (a CUstream) of the current context,
 * allocates nothing and waits for nothing. Plans are made on the host and read nothing of the
 * device but its number of SMs. */
#ifndef MLA_FLASHINFER_H
#define MLA_FLASHINFER_H

#include "cutlass_mla.h"
#include "finish.h"
#include "mla.h"
#include "ragged.h"
#include "status.h"

#endif
