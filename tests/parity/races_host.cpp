// Small kernels, each of which is right, or wrong in one way: two blocks of a cluster, of two warps each.

constexpr int THREADS = 64, CLUSTER = 2, SHARED = 4096;
#include "fibers.h"

#define STAND_INS "stand_ins.h"
#include "ring.cuh"

alignas(16) static u32 handed_on[64];
static u64 counter;
constexpr u32 THERE = 7;

static u32* mine(int index) { return (u32*)shared_memory() + index; }
static void read(const u32* p) { *(const volatile u32*)p; }
static void await_word(const u32* p)
{
    u32 x;
    look_until([&] { return load(x, p), x == THERE; });
}
static bool is_first(int block) { return blockIdx.x == block && threadIdx.x == 0; }
static u32 make_barrier()
{
    const u32 barrier = address(mine(512));
    if (threadIdx.x == 0) init(barrier, 1);
    return barrier;
}
static void read_behind_copy(int reader, bool is_awaited)
{
    copy_later(mine(threadIdx.x), handed_on + threadIdx.x);
    if (is_awaited) await_copies();
    if (threadIdx.x == reader) read(mine(0));
}
static void pass_barrier(bool is_awaited)
{
    const u32 barrier = make_barrier();
    __syncthreads();
    if (threadIdx.x == 0) *mine(0) = 1, arrive(barrier);
    if (threadIdx.x != 40) return;
    if (is_awaited) wait(barrier, 0);
    read(mine(0));
}
static void hand_on_word(bool is_fenced, void (*use)())  // and what was written before
{
    if (is_first(0)) {
        handed_on[0] = 1;
        if (is_fenced) __threadfence();
        store(&handed_on[1], THERE);
    }
    if (is_first(1)) await_word(&handed_on[1]), use();
}
static void overwrite_what_was_read(bool is_awaited)
{
    if (is_first(0)) read(&handed_on[0]), store(&handed_on[1], THERE);
    if (!is_first(1)) return;
    if (is_awaited) await_word(&handed_on[1]);
    handed_on[0] = 1;
}
static void arrive_elsewhere(bool meets_at_end)
{
    const u32 barrier = make_barrier();
    cluster_meets();
    if (is_first(1)) arrive_in(of_cluster(0), barrier);
    if (meets_at_end) cluster_meets();
}

struct Sample { const char* name; void (*run)(); };
static const Sample SAMPLES[] = {
    {"threads of a block meet", [] { *mine(threadIdx.x) = 1, __syncthreads(), read(mine(threadIdx.x ^ 32)); }},
    {"threads do not meet", [] { *mine(threadIdx.x) = 1, read(mine(threadIdx.x ^ 1)); }},
    {"threads meet too early", [] { __syncthreads(), *mine(threadIdx.x) = 1, read(mine(threadIdx.x ^ 1)); }},
    {"threads of a warp meet", [] { *mine(threadIdx.x) = 1, __syncwarp(), read(mine(threadIdx.x ^ 1)); }},
    {"another warp meets", [] { *mine(threadIdx.x) = 1, __syncwarp(), read(mine(threadIdx.x ^ 32)); }},
    {"a shuffle", [] { *mine(threadIdx.x) = 1, __shfl_xor_sync(~0u, 0, 1), read(mine(threadIdx.x ^ 1)); }},
    {"halves of a word", [] { ((unsigned short*)mine(0))[threadIdx.x] = 1; }},
    {"equal values", [] { *mine(0) = 1; }},
    {"a copy", [] { read_behind_copy(0, true); }},
    {"a copy that is not awaited", [] { read_behind_copy(0, false); }},
    {"a copy that another awaits", [] { read_behind_copy(1, true); }},
    {"a barrier", [] { pass_barrier(true); }},
    {"a barrier that is not awaited", [] { pass_barrier(false); }},
    {"a barrier that others make", [] { arrive(make_barrier()); }},
    {"a released word", [] {
        if (is_first(0)) handed_on[0] = 1, add_released(&counter, 1);
        if (is_first(1)) look_until([] { return acquired(&counter) == 1; }), read(&handed_on[0]);
    }},
    {"a word", [] { hand_on_word(true, [] { read(&handed_on[0]); }); }},
    {"a word to a place behind a fence", [] { hand_on_word(true, [] { store(&handed_on[0], THERE); }); }},
    {"a word to a place without a fence", [] { hand_on_word(false, [] { store(&handed_on[0], THERE); }); }},
    {"what was read", [] { overwrite_what_was_read(true); }},
    {"what may still be read", [] { overwrite_what_was_read(false); }},
    {"a block that others wait for", [] { arrive_elsewhere(true); }},
    {"a block that may have ended", [] { arrive_elsewhere(false); }},
};
static const Sample* chosen;

extern "C" void watch(const char*, const void*, size_t);
extern "C" bool launch(const char* name)
{
    for (const Sample& sample : SAMPLES)
        if (!strcmp(sample.name, name)) chosen = &sample;
    if (!chosen || strcmp(chosen->name, name)) abort();
    watch("handed_on", handed_on, sizeof handed_on), watch("counter", &counter, sizeof counter);
    memset(handed_on, 0, sizeof handed_on), counter = 0;
    return run_blocks({2, 1, 1}, [] { chosen->run(); }, 0);
}
