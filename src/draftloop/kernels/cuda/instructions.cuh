// What CUDA C++ has no word for: instructions of compute capability 9.0. A test puts stand-ins in their place, and runs
// kernels on the host.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { char bytes[128]; };

#ifdef STAND_INS
#include STAND_INS
#else
__device__ __forceinline__ unsigned char* shared_memory()
{
    extern __shared__ __align__(1024) unsigned char memory[];
    return memory;
}
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void rest() {}  // between looks, which take their time
__device__ __forceinline__ u32 rounded(float first, float second)
{
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ u32 product_of_pairs(u32 first, u32 second)
{
    u32 pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(first), "r"(second));
    return pair;
}
template <u32 MORE> __device__ __forceinline__ u32 masked_or(u32 bits, u32 mask)
{
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(bits), "r"(mask), "n"(MORE));
    return found;
}
__device__ __forceinline__ float from_half(u32 bits)  // fp16
{
    float x;
    asm("{ .reg .f16 h, rest; mov.b32 {h, rest}, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(bits));
    return x;
}
__device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void forget(int& value) { asm volatile("" : "+r"(value)); }  // what the compiler knows of it
// Registers that a thread may use from here on, by all four warps of a group.
template <int COUNT> __device__ __forceinline__ void keep_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Kernels one behind the other.
__device__ __forceinline__ void await_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// Barriers.
__device__ __forceinline__ void threads_meet(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
__device__ __forceinline__ void init(u32 barrier, u32 count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void show_barriers_to_copies()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same barrier in another block of the cluster.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank)
{
    asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
                 ::"r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ void cluster_meets()
{
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier)
{
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes)
{
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }"
                 ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool is_past(u32 barrier, u32 parity)
{
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ u64 acquired(const u64* p)
{
    u64 seen;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(p) : "memory");
    return seen;
}
__device__ __forceinline__ void add_released(u64* p, u64 more)
{
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(more) : "memory");
}

// The copy engine.
__device__ __forceinline__ u64 read_once()
{
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void make_ready(const TensorMap& map)  // which the host has written to global memory
{
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(&map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// A box of a matrix of weights, from a row and a chunk of columns on: chunks one after the other, in each of them the
// rows, of both halves of a matrix that has two. Rows are lines of 128 bytes, or what groups have of 8 rows.
__device__ __forceinline__ void copy(u32 to, const TensorMap& map, int chunk, int row, u32 barrier, u64 policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %2, %4}], [%5], %6;"
                 ::"r"(to), "l"(&map), "r"(0), "r"(row), "r"(chunk), "r"(barrier), "l"(policy) : "memory");
}
// To the same place in each block of the cluster that has a bit in `blocks`, and counted by each one's barrier.
__device__ __forceinline__ void copy_to_all(u32 to, const TensorMap& map, int column, int row, u32 barrier, int blocks)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((short)blocks) : "memory");
}
// What blocks hand on to each other, word by word: no order among words is asked for.
__device__ __forceinline__ void load(u32& x, const u32* p)
{
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p));
}
__device__ __forceinline__ void load(u32 (&x)[2], const u32* p)
{
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(p));
}
__device__ __forceinline__ void load(uint4& x, const uint4* p)
{
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
}
__device__ __forceinline__ void store(u32* p, u32 x)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x));
}
__device__ __forceinline__ void store(u32* p, u32 first, u32 second)
{
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(first), "r"(second));
}

// Keys, which other multiprocessors may have written: L1 must not answer.
__device__ __forceinline__ uint4 load_four(const uint4* p)
{
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
    return x;
}

// Copies by threads, which do not wait for them: of 4 bytes, or of 16 that may be zeros instead.
__device__ __forceinline__ void copy_later(u32* to, const u32* from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_later(uint4* to, const uint4* from, bool zeros)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(address(to)), "l"(from), "r"(zeros ? 0 : 16) : "memory");
}
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int YOUNGEST> __device__ __forceinline__ void await_copies()  // but for so many commitments
{
    asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGEST) : "memory");
}

// What is at the same place of shared memory in a block of the cluster.
__device__ __forceinline__ float2 load_pair_from(u32 at, u32 rank)
{
    float2 x;
    asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %2, %3; ld.shared::cluster.v2.f32 {%0, %1}, [there]; }"
                 : "=f"(x.x), "=f"(x.y) : "r"(at), "r"(rank) : "memory");
    return x;
}
__device__ __forceinline__ float4 load_four_from(u32 at, u32 rank)
{
    float4 x;
    asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %4, %5; "
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at), "r"(rank) : "memory");
    return x;
}

__device__ __forceinline__ u32 load_half(u32 at)  // 16 bits of shared memory
{
    u32 bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(bits) : "r"(at));
    return bits;
}

// Matrices of 8 x 8 bf16, and products of 16 x 16 by 16 x 8.
__device__ __forceinline__ void load_matrices(u32 (&b)[4], u32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
}
__device__ __forceinline__ void load_matrices(u32 (&b)[2], u32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(at));
}
__device__ __forceinline__ void load_transposed(u32 (&b)[4], u32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&b)[2], u32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ void multiply_add(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Products by a group of four warps, which wait for them later.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int YOUNGEST> __device__ __forceinline__ void await_products()  // but for so many commitments
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(YOUNGEST) : "memory");
}
__device__ __forceinline__ void forget(float& value) { asm volatile("" : "+f"(value)::"memory"); }
#endif

// 16 columns of rows in shared memory, of which 64 columns of bf16 are 128 bytes, swizzled by the copy engine: where
// they start, a distance that rows like these do not have, that of 8 rows to the next, all in units of 16 bytes; and how
// they are swizzled (PTX ISA, matrix descriptor).
__device__ __forceinline__ u64 described(u32 at)
{
    return (u64)(at >> 4) | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float lowest() { return __uint_as_float(0xff800000u); }  // minus infinity
