// streamed_pass.cu on the host: every thread of every block is a fiber, which goes on until it has to wait.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

constexpr int THREADS = TOKENS > 8 ? 384 : 288, STACK_BYTES = 32 << 10;
constexpr int SHARED = SCRATCH_BYTES + SLOTS * SLOT_BYTES + SHARED_BYTES;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct Index { int x; };
struct Gathering { int here = 0; long number = 0; };
struct Barrier { int expected, missing; long bytes; unsigned phase; };  // an mbarrier
struct Warp {
    Gathering gathering;
    unsigned shown[32];
    float a[16][16], b[16][8];  // of a product, which all of its threads have
};
struct Block {
    unsigned char* memory;
    Gathering all, some, cluster;
    Warp warps[12];
    std::map<unsigned, Barrier> barriers;
};
struct Fiber {
    ucontext_t context;
    Index thread, block;
    bool ended;
    std::vector<std::function<void()>> begun;  // products, which are computed when they are waited for
    std::deque<size_t> committed;              // how many had begun by then
};

static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Fiber* self;
static ucontext_t scheduler;
static Index gridDim;
#define threadIdx self->thread
#define blockIdx self->block

static Block& here() { return blocks[blockIdx.x]; }
static Warp& warp() { return here().warps[threadIdx.x / 32]; }
static void give_way() { swapcontext(&self->context, &scheduler); }
static void meet(Gathering& gathering, int size)
{
    const long number = gathering.number;
    if (++gathering.here == size) gathering.here = 0, gathering.number++;
    while (gathering.number == number) give_way();
}

static void __syncthreads() { meet(here().all, THREADS); }
static void __syncwarp() { meet(warp().gathering, 32); }
static void __trap() { abort(); }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;
static float __uint_as_float(unsigned bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static unsigned bits_of(float value)
{
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
#define __float_as_uint bits_of
static void __threadfence() {}
static float quick_exp(float x) { return expf(x); }
#define __expf quick_exp
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static float __shfl_xor_sync(unsigned, float value, int distance)
{
    warp().shown[threadIdx.x % 32] = bits_of(value);
    __syncwarp();
    const float other = __uint_as_float(warp().shown[threadIdx.x % 32 ^ distance]);
    __syncwarp();
    return other;
}

#define STAND_INS "streamed_pass_stand_ins.h"
#if TOKENS > 8
#include "wide_pass.cu"
#define streamed_pass wide_pass
#else
#include "streamed_pass.cu"
#endif

static Pass given;

static void run_thread()
{
    streamed_pass(given);
    self->ended = true;
    give_way();
}

extern "C" bool launch(int num_blocks, const Pass& pass)
{
    given = pass, gridDim.x = num_blocks;
    blocks = std::vector<Block>(num_blocks);
    fibers = std::vector<Fiber>(num_blocks * THREADS);
    std::vector<char> stacks(fibers.size() * STACK_BYTES);
    for (Block& block : blocks) {
        block.memory = (unsigned char*)aligned_alloc(1024, SHARED);
        memset(block.memory, 0xff, SHARED);  // NaN
    }
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber& fiber = fibers[i];
        fiber.thread.x = i % THREADS, fiber.block.x = i / THREADS, fiber.ended = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = &stacks[i * STACK_BYTES], fiber.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.context, run_thread, 0);
    }
    size_t running = fibers.size();
    for (long rounds = 0; running && rounds < 200000; rounds++) {
        running = 0;
        const int offset = rand() % 4;  // blocks are not equally fast
        for (Fiber& fiber : fibers) {
            if (fiber.ended) continue;
            running++;
            if ((fiber.block.x + offset) % 4 == rounds / 256 % 4) continue;
            self = &fiber;
            swapcontext(&scheduler, &fiber.context);
        }
    }
    for (Block& block : blocks) free(block.memory);
    return !running;
}
