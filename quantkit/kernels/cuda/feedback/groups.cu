// Sweeps over the groups of columns of tiles whose levels come from a grid: a thread block has a tile. Macros: those
// of search.cuh; HELD, KEEPS_SQUARE and SHARED_BYTES, from groups.py.
//     error_feedback_groups       chooses all levels with error feedback
//     descend_groups    chooses each group again while the others are fixed, and maintains g = H (x - v)
#define BLOCKS_AT_ONCE 2
#define WARPS_OF_TILE 8
#include "feedback/group_sweeps.cuh"

struct error_feedback_groups_args : group_args {};
struct descend_groups_args : group_args {};

KERNEL(error_feedback_groups, 256) {
    DYNAMIC_SHARED(memory);
    error_feedback_groups(a, memory);
}

KERNEL(descend_groups, 256) {
    DYNAMIC_SHARED(memory);
    descend_groups(a, memory);
}
