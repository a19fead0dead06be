// What kernels/cuda/instructions.cuh has, in C++. Blocks of a cluster are neighbours along x, unless a kernel says what
// its CLUSTER_RANK is, and the CLUSTER_STEP from one to the next.

static unsigned char* shared_memory() { return here().memory; }
static u32 address(const void* p) { return (unsigned char*)p - here().memory; }
static void threads_meet(int threads) { meet(here().some, threads, races::NAMED_BARRIER); }
static u32 nearest(float value)
{
    const u32 bits = bits_of(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 rounded(float first, float second) { return nearest(first) | nearest(second) << 16; }
static u32 product_of_pairs(u32 first, u32 second)
{
    return rounded(__uint_as_float(first << 16) * __uint_as_float(second << 16),
                   __uint_as_float(first & 0xffff0000) * __uint_as_float(second & 0xffff0000));
}
template <u32 MORE> static u32 masked_or(u32 bits, u32 mask) { return bits & mask | MORE; }
static float from_half(u32 bits)
{
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return bits >> 15 ? -size : size;
}
static float power_of_two(float x) { return exp2f(x); }
static void rest() { give_way(); }
static void await_kernel_in_front() {}
static void let_next_kernel_start() {}

static void settle(Block& block, u32 at)
{
    Barrier& barrier = block.barriers.at(at);
    // bytes that other blocks have asked for may come before they are expected
    if (barrier.missing < 0 || (!barrier.missing && barrier.bytes < 0)) abort();
    if (barrier.missing || barrier.bytes) return;
    barrier.phase ^= 1, barrier.missing = barrier.expected;
    races::complete(block.memory + at);
}
static void init(u32 barrier, u32 count)
{
    here().barriers[barrier] = {(int)count, (int)count, 0, 0};
    races::init(here().memory + barrier);
}
static void show_barriers_to_copies() { races::show_barriers(); }
static void arrive_in(Block& block, u32 at)
{
    races::arrive(block.memory + at);
    block.barriers.at(at).missing--;
    settle(block, at);
}
static void arrive(u32 at) { arrive_in(here(), at); }
#ifndef CLUSTER_RANK
#define CLUSTER_RANK (blockIdx.x % CLUSTER)
#define CLUSTER_STEP 1
#endif
static Block& of_cluster(int rank) { return blocks[self->place + (rank - CLUSTER_RANK) * CLUSTER_STEP]; }
static void arrive_at(u32 at, u32 rank) { arrive_in(of_cluster(rank), at); }
static void cluster_meets() { meet(of_cluster(0).cluster, CLUSTER * THREADS, races::CLUSTER_BARRIER); }
static void expect(u32 at, u32 bytes)
{
    here().barriers.at(at).bytes += bytes;
    arrive(at);
}
static bool is_past(u32 barrier, u32 parity)
{
    give_way();
    if (here().barriers.at(barrier).phase == parity) return false;
    races::look(here().memory + barrier);
    return true;
}

static u64 read_once() { return 0; }
static void make_ready(const TensorMap&) {}
static void copy_in(Block& block, u32 to, const TensorMap& map, const long (&first)[4], u32 at)
{
    struct { const unsigned char* values; long sizes[4], strides[3], box[4], is_swizzled; } all;
    memcpy(&all, &map, sizeof all);
    if (to % 128) abort();
    for (int i = 0; i < 4; i++)
        if (first[i] + all.box[i] > all.sizes[i]) abort();
    const long line_bytes = all.box[0] * 2, lines = all.box[1] * all.box[2] * all.box[3];
    for (long line = 0; line < lines; line++) {
        const long one = line % all.box[1], two = line / all.box[1] % all.box[2], three = line / all.box[1] / all.box[2];
        const long from = first[0] + (first[1] + one) * all.strides[0] + (first[2] + two) * all.strides[1] +
                          (first[3] + three) * all.strides[2];
        for (long part = 0; part < line_bytes; part += 16) {
            const u32 place = to + line * line_bytes + part;
            unsigned char* const there = block.memory + (all.is_swizzled ? place ^ place / 128 % 8 * 16 : place);
            races::copy_in(there, 16, block.memory + at);
            races::Quiet quiet;
            memcpy(there, all.values + from * 2 + part, 16);
        }
    }
    block.barriers.at(at).bytes -= lines * line_bytes;
    settle(block, at);
}
static void copy(u32 to, const TensorMap& map, int chunk, int row, u32 at, u64)
{
    copy_in(here(), to, map, {0, row, 0, chunk}, at);
}

template <class Words> static void load_words(Words& x, const void* p)
{
    races::load_word(p, sizeof x);
    races::Quiet quiet;
    memcpy(&x, p, sizeof x);
}
static void load(u32& x, const u32* p) { load_words(x, p); }
static void load(u32 (&x)[2], const u32* p) { load_words(x, p); }
static void load(uint4& x, const uint4* p) { load_words(x, p); }
static void store(u32* p, u32 x)
{
    races::store_word(p, 4);
    races::Quiet quiet;
    *p = x;
}
static void store(u32* p, u32 first, u32 second) { store(p, first), store(p + 1, second); }
static uint4 load_four(const uint4* p) { return *p; }
template <class Words> static void begin_copy(Words* to, const Words* from)  // of zeros, if from null
{
    races::copy_later(to, from, sizeof *to, self->commitments + 1);
    self->begun.push_back([=] {
        races::Quiet quiet;
        *to = from ? *from : Words{};
    });
}
static void copy_later(u32* to, const u32* from) { begin_copy(to, from); }
static void copy_later(uint4* to, const uint4* from, bool zeros) { begin_copy(to, zeros ? nullptr : from); }
static void commit() { self->committed.push_back(self->begun.size()), self->commitments++; }
static void make_begun(size_t youngest)  // copies or products, but for so many commitments
{
    size_t done = 0;
    while (self->committed.size() > youngest) done = self->committed.front(), self->committed.pop_front();
    {
        races::Quiet quiet;
        for (size_t i = 0; i < done; i++) self->begun[i]();
    }
    self->begun.erase(self->begun.begin(), self->begun.begin() + done);
    for (size_t& count : self->committed) count -= done;
}
static void commit_copies() { commit(); }
template <int YOUNGEST> static void await_copies()
{
    make_begun(YOUNGEST);
    races::await_copies(self->commitments - self->committed.size());
}
static void await_copies() { commit_copies(), await_copies<0>(); }
static float2 load_pair_from(u32 at, u32 rank)
{
    float2 x;
    memcpy(&x, of_cluster(rank).memory + at, sizeof x);
    return x;
}
static float4 load_four_from(u32 at, u32 rank)
{
    float4 x;
    memcpy(&x, of_cluster(rank).memory + at, sizeof x);
    return x;
}
static void add_released(u64* p, u64 more)
{
    races::add_released(p);
    races::Quiet quiet;
    *p += more;
}
static u64 acquired(const u64* p)
{
    give_way();
    races::acquire_word(p);
    races::Quiet quiet;
    return *p;
}

static u32 load_half(u32 at)
{
    unsigned short bits;
    memcpy(&bits, here().memory + at, 2);
    return bits;
}
template <int N> static void show_address(u32 at, void (*take)(u32 (&)[N], const unsigned*), u32 (&b)[N])
{
    warp().shown[threadIdx.x % 32] = at;
    warp_meets();
    take(b, warp().shown);
    warp_meets();
}
template <int N> static void load_matrices(u32 (&b)[N], u32 at)
{
    show_address<N>(at, [](u32 (&b)[N], const unsigned* lines) {
        const int lane = threadIdx.x % 32;
        for (int matrix = 0; matrix < N; matrix++)
            memcpy(&b[matrix], here().memory + lines[matrix * 8 + lane / 4] + lane % 4 * 4, 4);
    }, b);
}
template <int N> static void load_transposed(u32 (&b)[N], u32 at)
{
    show_address<N>(at, [](u32 (&b)[N], const unsigned* lines) {
        const int lane = threadIdx.x % 32;
        for (int matrix = 0; matrix < N; matrix++)
            for (int i = 0; i < 2; i++)
                memcpy((char*)&b[matrix] + 2 * i,
                       here().memory + lines[matrix * 8 + lane % 4 * 2 + i] + lane / 4 * 2, 2);
    }, b);
}
static void multiply_add(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)
{
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
    const u32 a[2][2] = {{a0, a2}, {a1, a3}}, b[2] = {b0, b1};  // rows and 8 more, columns and 8 more
    Warp& mine = warp();
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 2; i++) {
            for (int more = 0; more < 2; more++)
                mine.a[row + 8 * more][pair + half * 8 + i] = __uint_as_float(a[more][half] >> 16 * i << 16);
            mine.b[pair + half * 8 + i][row] = __uint_as_float(b[half] >> 16 * i << 16);
        }
    warp_meets();
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) sums[i] += mine.a[row + i / 2 * 8][k] * mine.b[k][pair + i % 2];
    warp_meets();
}
static void forget(int&) {}
static void forget(float&) {}
template <int COUNT> static void keep_registers() {}
template <int COUNT> static void take_registers() {}

static u32 place_of(u64 descriptor, int row, int column)
{
    const u32 start = (descriptor & 0x3fff) * 16, next_rows = (descriptor >> 32 & 0x3fff) * 16;
    if (descriptor >> 62 != 1) abort();
    const u32 at = start + row / 8 * next_rows + row % 8 * 128 + column * 2;
    if (at >= SHARED) abort();
    return at ^ at / 128 % 8 * 16;
}
static float element(u64 descriptor, int row, int column)
{
    unsigned short bits;
    memcpy(&bits, here().memory + place_of(descriptor, row, column), 2);
    return __uint_as_float((u32)bits << 16);
}
static void read_later(u64 descriptor, int row, int half)  // 8 of 16 columns
{
    races::multiply_later(here().memory + place_of(descriptor, row, half * 8), 16, self->commitments + 1);
}
static void begin_products() {}
static void commit_products() { commit(); }
template <int YOUNGEST> static void await_products()
{
    make_begun(YOUNGEST);
    warp_meets();
    races::await_products(self->commitments - self->committed.size());
}
template <int FIRST, int COUNT, int TILES>
static void multiply_add_64(float (&sums)[TILES][4], u64 tokens, u64 weights)
{
    const int lane = threadIdx.x % 32;  // the warp's rows, and all columns, are read by it together
    read_later(tokens, threadIdx.x / 32 % 4 * 16 + lane / 2, lane % 2);
    for (int column = lane / 2; column < COUNT * 8; column += 16) read_later(weights, column, lane % 2);
    self->begun.push_back([&sums, tokens, weights] {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
        for (int tile = 0; tile < COUNT; tile++)
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < 16; k++)
                    sums[FIRST + tile][i] += element(tokens, row + i / 2 * 8, k) *
                                             element(weights, tile * 8 + lane % 4 * 2 + i % 2, k);
    });
}
