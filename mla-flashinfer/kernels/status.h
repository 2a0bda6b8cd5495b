/* What every call has in common. See flashinfer.h. */
#ifndef MLA_FLASHINFER_STATUS_H
#define MLA_FLASHINFER_STATUS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What went wrong last on this thread: valid until its next call. Never null. */
const char* fi_last_error(void);

/* The SMs of the current device. */
int32_t fi_sms(int32_t* sms);

#ifdef __cplusplus
}
#endif

#endif
