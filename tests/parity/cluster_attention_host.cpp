// cluster_attention.cu on the host.

constexpr int SHARED = MEMORY_BYTES;
#include "fibers.h"

#define STAND_INS "stand_ins.h"
#include "cluster_attention.cu"

static Attention given;

extern "C" bool launch(int x, int y, int z, int seed, const Attention& attention)
{
    given = attention;
    return run_blocks({x, y, z}, [] { cluster_attention(given); }, seed);
}
