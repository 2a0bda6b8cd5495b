#include <sm90/decode/dense/instantiations/bf16.cu>
