// Matrix products of warpgroups are not emulated.
#pragma once

#include "sm90.cuh"
