// What each thread of a kernel on fibers knows to have happened, and how that gets about (races.h).
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

// Actors are a thread's loads, its stores, its copies, a warp's products, and copies that a barrier waits for. A time of
// an actor stands for all that it did up to then.
enum Doing { LOADS, STORES, COPIES, MULTIPLIES, COPIES_IN };
struct Actor { Doing doing; int thread; };  // the first of a warp, or of the barrier's block
static std::vector<Actor> actors;
static int actor_of(int& kept, Doing doing, int thread)
{
    if (kept < 0) kept = actors.size(), actors.push_back({doing, thread});
    return kept;
}

using Times = std::vector<unsigned>;  // by actor
using Clock = std::shared_ptr<const Times>;
static Clock stopped(Times&& times) { return std::make_shared<const Times>(std::move(times)); }
static unsigned at(const Clock& clock, int actor) { return clock && actor < (int)clock->size() ? (*clock)[actor] : 0; }
static void raise(Times& times, int actor, unsigned time)
{
    if (actor < 0) return;  // which has done nothing
    if (actor >= (int)times.size()) times.resize(actors.size());
    times[actor] = std::max(times[actor], time);
}
static void join(Times& times, const Clock& more)
{
    if (!more) return;
    if (times.size() < more->size()) times.resize(more->size());
    for (size_t i = 0; i < more->size(); i++) times[i] = std::max(times[i], (*more)[i]);
}
// Threads that have met share a clock, so the same two are joined again and again.
static std::map<std::pair<Clock, Clock>, Clock> joined;
static void learn(Clock& clock, const Clock& more)
{
    if (!more || clock == more) return;
    if (joined.size() > 512) joined.clear();
    Clock& both = joined[{clock, more}];
    if (!both) {
        Times times = clock ? *clock : Times();
        join(times, more);
        both = clock && times == *clock ? clock : times == *more ? more : stopped(std::move(times));
    }
    clock = both;
}

struct Published { Clock visible; int loads; unsigned time; };  // with a word, by a thread whose loads are over
struct Thread {
    Clock known, visible;  // to it; and what is visible to all, of which it has heard
    int actors[3] = {-1, -1, -1};
    unsigned now = 1, copied = 0;  // of its loads and stores; of its copies
    bool has_published = false;    // its loads up to now
    std::vector<Published> heard;  // which `visible` lacks
    std::vector<unsigned> calls;   // of functions that it is in
};
static const Clock& hear(Thread& thread)
{
    if (!thread.heard.empty()) {
        Times times = thread.visible ? *thread.visible : Times();
        std::vector<Clock> from;
        for (const Published& one : thread.heard) {
            if (std::find(from.begin(), from.end(), one.visible) == from.end())
                join(times, one.visible), from.push_back(one.visible);
            raise(times, one.loads, one.time);
        }
        thread.heard.clear(), thread.visible = stopped(std::move(times));
    }
    return thread.visible;
}

struct Signal {
    Times known, visible;            // of those that have released
    Clock last_known, last_visible;  // of the last of them
    Clock done_known, done_visible;  // of those before it was completed
    int copies = -1;                 // actor
    unsigned phase = 1;
    bool is_shown = false;           // to copies
};
static void tell(Signal& signal, Thread& me, bool to_all = false)
{
    hear(me);
    if (signal.last_known != me.known) join(signal.known, signal.last_known = me.known);
    if (signal.last_visible != me.visible) join(signal.visible, signal.last_visible = me.visible);
    if (to_all) join(signal.visible, me.known), raise(signal.visible, me.actors[STORES], me.now);
    raise(signal.visible, me.actors[LOADS], me.now);
    for (Doing doing : {LOADS, STORES}) raise(signal.known, me.actors[doing], me.now);
    raise(signal.known, me.actors[COPIES], me.copied);
    me.now++, me.has_published = false;
}
static void be_told(const Signal& signal, Thread& me)
{
    hear(me);
    learn(me.known, signal.done_known), learn(me.visible, signal.done_visible);
}
