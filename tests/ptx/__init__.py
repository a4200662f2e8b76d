"""PTX on the CPU: NVRTC's output for quantkit's kernels, translated to C++ and run on the fibers of tests/shim.

The shim compiles the text of a kernel; here the compiler's own output runs, inline assembly and branches for the device
included. parse.py reads PTX, instructions.py says what instructions there are, translate.py writes C++ of them,
machine.h and machine.cpp are their meaning, written from the PTX ISA document alone, and device.py runs them.
"""
