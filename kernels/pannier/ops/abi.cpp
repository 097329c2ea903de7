// Which version of the interface this library has: Python asks before anything else.

#include "vector.h"

extern "C" EXPORT int pannier_abi() { return pannier::ABI; }
