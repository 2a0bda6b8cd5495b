#include <smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu>
