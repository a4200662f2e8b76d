// Every unpacker, by the name of its type: a module is compiled with, for example, TYPE defined as Q4_K, and uses
// TYPE::unpack. Tables are static and vanish where no unpacker of the module reads them.
#pragma once
#include "unpack/k_quants.cuh"
#include "unpack/legacy.cuh"
