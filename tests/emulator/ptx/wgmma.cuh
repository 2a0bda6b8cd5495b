// Warpgroup MMAs are not emulated.
#pragma once

#include "sm90.cuh"
