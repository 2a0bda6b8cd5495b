#include <sm90/decode/dense/instantiations/fp16.cu>
