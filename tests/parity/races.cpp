// How races are found: what has touched each 16 bits of memory, and whether the next that does comes after it.
#include "races.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>

#include "race_clocks.h"

namespace races {
int running;
static int quiet;
Quiet::Quiet() { quiet++; }
Quiet::~Quiet() { quiet--; }

namespace {
const char* const NAMES[ORDERS] = {
    "nothing", "syncthreads", "syncwarp", "named_barrier", "cluster_barrier", "mbarrier", "copy_engine",
    "shown_barriers", "threads_copies", "products", "words", "counter", "threadfence"};
Order forgotten;

enum Kind { READ, WRITE, WORD_LOAD, WORD_STORE };
bool is_word(Kind kind) { return kind >= WORD_LOAD; }
struct Access {
    int actor = -1;
    unsigned time;
    Kind kind;
    bool is_seen;  // a word, by a load
    unsigned where, caller;  // behind the library's first byte
};
struct Cell {  // of 16 bits, the least that kernels access
    Access written;              // last, not as a word
    std::vector<Access> others;  // since
};
struct Memory {
    std::string name;
    uintptr_t begin, end;
    std::vector<Cell> cells;
    std::vector<Published> words;  // of 4 bytes
    Memory(std::string name, const void* at, size_t bytes, bool has_words)
        : name(name), begin((uintptr_t)at), end(begin + bytes), cells((bytes + 1) / 2), words(has_words ? bytes / 4 : 0) {}
};
int threads_of_block;
size_t bytes_of_block;
std::vector<Thread> threads;
std::vector<int> products;  // actor of each warp
std::unordered_map<const void*, Signal> signals;
std::vector<Memory> memories;  // shared memory of all blocks, then what is watched
std::map<std::string, std::pair<const void*, size_t>> watched;
std::vector<std::string> found;
constexpr size_t ENOUGH = 64;
std::map<std::pair<unsigned, unsigned>, int> reported;

Thread& self() { return threads[running]; }
int own(Doing doing) { return actor_of(self().actors[doing], doing, running); }

std::string described(const Access& access)
{
    static const char* const DONE[] = {"read", "written", "loaded as a word", "stored as a word"};
    static const char* const BY[] = {"", "", "a copy of ", "products of the warp of ", "the copy engine for "};
    const Actor& by = actors[access.actor];
    char thread[20] = "", text[200];
    if (by.doing != COPIES_IN) snprintf(thread, sizeof thread, "thread %d of ", by.thread % threads_of_block);
    snprintf(text, sizeof text, "%s by %s%sblock %d at @%x<%x", DONE[access.kind], BY[by.doing], thread,
             by.thread / threads_of_block, access.where, access.caller);
    return text;
}
void report(const Memory& memory, size_t byte, const Access& before, const std::string& then, unsigned where)
{
    if (reported[{before.where, where}]++ || found.size() == ENOUGH) return;
    std::string place = memory.name + " + " + std::to_string(byte);
    if (&memory == &memories[0])
        place = "shared memory of block " + std::to_string(byte / bytes_of_block) + " + " +
                std::to_string(byte % bytes_of_block);
    found.push_back(place + ": " + described(before) + ", then " + then);
}

// Whether what the running thread does, or asks for, comes after.
bool comes_after(Thread& me, const Access& before, Kind kind)
{
    const Actor& by = actors[before.actor];
    if (by.thread == running && by.doing <= STORES) return true;
    if (by.thread == running && by.doing == COPIES && before.time <= me.copied) return true;
    if (at(me.known, before.actor) >= before.time) return true;
    const bool by_words = is_word(kind) || (kind == WRITE && (is_word(before.kind) || by.doing == LOADS));
    return by_words && at(hear(me), before.actor) >= before.time;
}

// By the running thread, or by another actor on its behalf.
void check_and_keep(Memory& memory, size_t byte, size_t bytes, const Access& access, bool is_kept = true)
{
    Thread& me = self();
    const Kind kind = access.kind;
    for (size_t i = byte / 2; i < (byte + bytes + 1) / 2; i++) {
        Cell& cell = memory.cells[i];
        const auto check = [&](const Access& before) {
            if (!comes_after(me, before, kind)) report(memory, i * 2, before, described(access), access.where);
        };
        if (cell.written.actor >= 0) check(cell.written);
        Access* mine = nullptr;
        for (Access& other : cell.others) {
            const bool is_store = kind == WRITE || kind == WORD_STORE || other.kind == WORD_STORE;
            // a word that was seen is there: who comes after those that saw it comes after it
            if (is_store && !(is_word(kind) && is_word(other.kind)) && !(kind == WRITE && other.is_seen)) check(other);
            if (other.kind == WORD_STORE && kind == WORD_LOAD) other.is_seen = true;
            if (other.actor == access.actor && other.kind == kind) mine = &other;
        }
        if (!is_kept) continue;
        if (kind == WRITE) cell.written = access, cell.others.clear();
        else if (mine) *mine = access;
        else cell.others.push_back(access);
    }
    if (kind == WRITE)
        for (size_t i = byte / 4; i < std::min((byte + bytes + 3) / 4, memory.words.size()); i++) memory.words[i] = {};
}

Memory* find(const void* p)
{
    for (Memory& memory : memories)
        if ((uintptr_t)p - memory.begin < memory.end - memory.begin) return &memory;
    return nullptr;
}
unsigned offset(const void* code)  // of the call that returns there
{
    static uintptr_t first;
    Dl_info info;
    if (!first && dladdr((void*)begin, &info)) first = (uintptr_t)info.dli_fbase;
    return (uintptr_t)code - first - 1;
}
void access(const void* p, size_t bytes, Kind kind, void* where, int actor = -1, unsigned time = 0, bool is_kept = true)
{
    Memory* memory = find(p);
    if (!memory) return;
    Thread& me = self();
    if (actor < 0) {
        const bool is_load = kind == READ || kind == WORD_LOAD;
        if (is_load && me.has_published) me.now++, me.has_published = false;
        actor = own(is_load ? LOADS : STORES), time = me.now;
    }
    check_and_keep(*memory, (uintptr_t)p - memory->begin, bytes,
                   {actor, time, kind, false, offset(where), me.calls.empty() ? 0 : me.calls.back()}, is_kept);
}
#define HERE __builtin_return_address(0)
}  // namespace

void begin(const void* shared, size_t bytes, int num_blocks, int num_threads)
{
    threads_of_block = num_threads, bytes_of_block = bytes;
    threads.assign(num_blocks * num_threads, {}), products.assign(threads.size() / 32, -1);
    actors.clear(), reported.clear();
    memories.emplace_back("shared memory", shared, bytes * num_blocks, false);
    for (const auto& [name, place] : watched) memories.emplace_back(name, place.first, place.second, true);
}
// A block's memory is another's when all of its threads have ended.
void end(bool is_whole)
{
    Memory& shared = memories[0];
    for (size_t block = 0; is_whole && block < threads.size() / threads_of_block; block++) {
        Signal ended;
        for (int i = 0; i < threads_of_block; i++) tell(ended, threads[block * threads_of_block + i]);
        const Clock known = stopped(std::move(ended.known));
        const auto check = [&](size_t cell, const Access& before) {
            if (before.actor >= 0 && at(known, before.actor) < before.time)
                report(shared, cell * 2, before, "the block ended", 0);
        };
        for (size_t cell = block * bytes_of_block / 2; cell < (block + 1) * bytes_of_block / 2; cell++) {
            check(cell, shared.cells[cell].written);
            for (const Access& other : shared.cells[cell].others) check(cell, other);
        }
    }
    threads.clear(), signals.clear(), joined.clear(), memories.clear();
}

void release(const void* signal, Order order)
{
    if (order != NOTHING && order != forgotten) tell(signals[signal], self());
}
void complete(const void* key)
{
    Signal& signal = signals[key];
    if (signal.copies >= 0 && forgotten != COPY_ENGINE) raise(signal.known, signal.copies, signal.phase);
    signal.phase++;
    signal.done_known = stopped(std::move(signal.known));
    signal.done_visible = stopped(std::move(signal.visible));
    signal.known = signal.visible = {};
    signal.last_known = signal.last_visible = nullptr;
}
void acquire(const void* signal, Order order)
{
    if (order != NOTHING && order != forgotten) be_told(signals[signal], self());
}
void add_released(const void* word)
{
    access(word, 8, WORD_STORE, HERE);
    if (forgotten == COUNTER) return;
    Signal& signal = signals[word];
    tell(signal, self(), true);
    signal.done_known = stopped(Times(signal.known));
    signal.done_visible = stopped(Times(signal.visible));
}
void acquire_word(const void* word)
{
    access(word, 8, WORD_LOAD, HERE);
    acquire(word, COUNTER);
}
void fence()
{
    if (forgotten == THREADFENCE) return;
    Thread& me = self();
    Times times = hear(me) ? *me.visible : Times();
    join(times, me.known);
    raise(times, me.actors[STORES], me.now);
    me.now++;
    me.visible = stopped(std::move(times));
}

void init(const void* barrier)
{
    access(barrier, 8, WRITE, HERE);
    signals[barrier] = {};
}
void show_barriers()
{
    if (forgotten == SHOWN_BARRIERS) return;
    for (auto& [key, signal] : signals) {
        const Memory* memory = find(key);
        if (!memory) continue;
        const Access& written = memory->cells[((uintptr_t)key - memory->begin) / 2].written;
        if (written.actor >= 0 && written.actor == self().actors[STORES]) signal.is_shown = true;
    }
}
void arrive(const void* barrier)
{
    access(barrier, 8, WORD_STORE, HERE);
    release(barrier, MBARRIER);
}
void look(const void* barrier)
{
    access(barrier, 8, WORD_LOAD, HERE, own(LOADS), self().now, false);
    be_told(signals[barrier], self());
}

void load_word(const void* p, size_t bytes)
{
    access(p, bytes, WORD_LOAD, HERE);
    Memory* memory = find(p);
    if (!memory || forgotten == WORDS) return;
    Thread& me = self();
    for (size_t i = 0; i < bytes; i += 4) {
        const Published& one = memory->words[((uintptr_t)p - memory->begin + i) / 4];
        if (one.time && at(me.visible, one.loads) < one.time) me.heard.push_back(one);
    }
}
void store_word(const void* p, size_t bytes)
{
    access(p, bytes, WORD_STORE, HERE);
    Memory* memory = find(p);
    if (!memory) return;
    Thread& me = self();
    me.has_published = true;
    for (size_t i = 0; i < bytes; i += 4)
        memory->words[((uintptr_t)p - memory->begin + i) / 4] = {hear(me), own(LOADS), me.now};
}
void copy_in(const void* to, size_t bytes, const void* barrier)
{
    Signal& signal = signals[barrier];
    if (signal.copies < 0) {
        const size_t byte = (uintptr_t)barrier - memories[0].begin;
        signal.copies = actors.size(), actors.push_back({COPIES_IN, int(byte / bytes_of_block) * threads_of_block});
    }
    access(to, bytes, WRITE, HERE, signal.copies, signal.phase);
    access(barrier, 8, WORD_STORE, HERE, signal.copies, signal.phase);
    if (!signal.is_shown && found.size() < ENOUGH) found.push_back("a barrier that copies were not shown");
    signal.is_shown = true;
}
void copy_later(const void* to, const void* from, size_t bytes, unsigned commitment)
{
    if (from) access(from, bytes, READ, HERE, own(COPIES), commitment);
    access(to, bytes, WRITE, HERE, own(COPIES), commitment);
}
void await_copies(unsigned commitments)
{
    if (forgotten != THREADS_COPIES) self().copied = commitments;
}
void multiply_later(const void* from, size_t bytes, unsigned commitment)
{
    const int warp = running / 32;
    access(from, bytes, READ, HERE, actor_of(products[warp], MULTIPLIES, warp * 32), commitment);
}
void await_products(unsigned commitments)
{
    if (forgotten == PRODUCTS) return;
    Times times;
    raise(times, products[running / 32], commitments);
    learn(self().known, stopped(std::move(times)));
}

extern "C" {
void watch(const char* name, const void* at, size_t bytes) { watched[name] = {at, bytes}; }
void forget(const char* name)
{
    int which = 0;
    while (which < ORDERS && strcmp(NAMES[which], name)) which++;
    if (which == ORDERS) abort();
    forgotten = (Order)which;
}
// What was found since the last call, a line each.
const char* races()
{
    static std::string text;
    text.clear();
    for (const std::string& one : found) text += one + "\n";
    found.clear();
    return text.c_str();
}

// What -fsanitize=thread calls.
void __tsan_init() {}
void __tsan_func_entry(void* caller)
{
    if (!threads.empty()) self().calls.push_back(offset(caller));
}
void __tsan_func_exit()
{
    if (!threads.empty() && !self().calls.empty()) self().calls.pop_back();
}
#define ACCESS(p, bytes, kind) if (!quiet && find(p)) access(p, bytes, kind, HERE)
void __tsan_read_range(const void* p, size_t bytes) { ACCESS(p, bytes, READ); }
void __tsan_write_range(const void* p, size_t bytes) { ACCESS(p, bytes, WRITE); }
#define OF_SIZE(N) \
    void __tsan_read##N(const void* p) { ACCESS(p, N, READ); } \
    void __tsan_write##N(const void* p) { ACCESS(p, N, WRITE); } \
    void __tsan_unaligned_read##N(const void* p) { ACCESS(p, N, READ); } \
    void __tsan_unaligned_write##N(const void* p) { ACCESS(p, N, WRITE); }
OF_SIZE(1) OF_SIZE(2) OF_SIZE(4) OF_SIZE(8) OF_SIZE(16)
// Compilers call these for what is copied or set whole, by one name or the other.
void* __real_memcpy(void*, const void*, size_t);
void* __real_memmove(void*, const void*, size_t);
void* __real_memset(void*, int, size_t);
#define COPIED(NAME, REAL) \
    void* NAME(void* to, const void* from, size_t bytes) \
    { \
        ACCESS(from, bytes, READ); \
        ACCESS(to, bytes, WRITE); \
        return REAL(to, from, bytes); \
    }
#define SET(NAME) \
    void* NAME(void* to, int value, size_t bytes) \
    { \
        ACCESS(to, bytes, WRITE); \
        return __real_memset(to, value, bytes); \
    }
COPIED(__wrap_memcpy, __real_memcpy) COPIED(__tsan_memcpy, __real_memcpy)
COPIED(__wrap_memmove, __real_memmove) COPIED(__tsan_memmove, __real_memmove)
SET(__wrap_memset) SET(__tsan_memset)
}
}  // namespace races
