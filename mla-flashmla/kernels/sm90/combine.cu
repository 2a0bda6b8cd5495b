#include <smxx/decode/combine/combine.cu>
