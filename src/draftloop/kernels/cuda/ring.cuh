// Slots of shared memory that the copy engine fills in turn, and how long anybody waits for one.
#pragma once
#include "instructions.cuh"

constexpr u32 PATIENCE = 1 << 24;  // looks, which are some seconds

// An error, not a hang. Where there is a trap, ptxas does not give groups of warps the registers that they take.
__device__ __forceinline__ void give_up() { *(volatile u32*)0 = 0; }

// Its code stands in the kernel once for each place that looks: instructions have to come from memory too.
template <class Look> __device__ __forceinline__ void look_until(Look is_there)
{
    for (u32 looks = 0; !is_there(); looks++) {
        rest();
        if (looks == PATIENCE) give_up();
    }
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity)
{
    look_until([&] { return is_past(barrier, parity); });
}

template <int SLOTS_OF, int BYTES>
struct RingOf {
    u32 slots, filled_barriers, freed_barriers;
    int slot = 0;
    u32 parity = 0;
    __device__ u32 at() const { return slots + slot * BYTES; }
    __device__ u32 filled() const { return filled_barriers + slot * 8; }
    __device__ u32 freed() const { return freed_barriers + slot * 8; }
    __device__ void advance() { if (++slot == SLOTS_OF) { slot = 0; parity ^= 1; } }
};
