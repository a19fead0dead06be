// streamed_pass.cu, or wide_pass.cu, on the host.

constexpr int THREADS = TOKENS > 8 ? 384 : 288;
constexpr int SHARED = SCRATCH_BYTES + SLOTS * SLOT_BYTES + SHARED_BYTES;
#include "fibers.h"

#define STAND_INS "streamed_pass_stand_ins.h"
#if TOKENS > 8
#include "wide_pass.cu"
#define streamed_pass wide_pass
#else
#include "streamed_pass.cu"
#endif

static Pass given;

extern "C" bool launch(int num_blocks, const Pass& pass)
{
    given = pass;
    return run_blocks({num_blocks, 1, 1}, [] { streamed_pass(given); });
}
