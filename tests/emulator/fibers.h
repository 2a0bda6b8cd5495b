// A CUDA grid on the host: every thread of a block is a fiber, and all blocks run at the same time.
//
// The next fiber to run is random, and a fiber may be interrupted at every instruction that
// tests/emulator/ptx/sm80.cuh emulates, so that a missing barrier shows as a wrong result.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include <ucontext.h>

namespace mla::emulator {

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

// A copy to shared memory that is in flight.
struct Copy {
    char* to;
    const void* from;
    int bytes, valid;

    void land() const {
        std::memcpy(to, from, valid);
        std::memset(to + valid, 0, bytes - valid);
    }
};

// Words that the lanes of a warp give to, and take from, a collective operation.
struct Warp {
    uint32_t given[32][8], taken[32][8];
    int arrived = 0;
    unsigned generation = 0;
};

struct Thread {
    // Context in which it begins, and the point from which it resumes later.
    ucontext_t begin;
    jmp_buf resume;
    std::unique_ptr<char[]> stack;
    Index index;
    bool begun = false, done = false;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

class Block {
  public:
    static Block*& current() {
        static Block* block = nullptr;
        return block;
    }

    Block(unsigned threads, size_t shared_bytes, unsigned seed, Index block, Index grid)
        : threads_(threads),
          warps_((threads + 31) / 32),
          shared_bytes_(shared_bytes),
          shared_(shared_bytes + 128),
          random_(seed) {
        block_index = block;
        grid_dim = grid;
        // NaN in every 16-bit type.
        std::memset(shared_.data(), 0xff, shared_.size());
    }

    void start(const std::function<void()>& kernel) {
        kernel_ = &kernel;
        left_ = threads_.size();
        for (unsigned i = 0; i < threads_.size(); ++i) {
            Thread& t = threads_[i];
            t.index.x = i;
            t.stack.reset(new char[kStack]);
            getcontext(&t.begin);
            t.begin.uc_stack.ss_sp = t.stack.get();
            t.begin.uc_stack.ss_size = kStack;
            t.begin.uc_link = nullptr;
            makecontext(&t.begin, &Block::enter, 0);
        }
    }

    // Runs every fiber once, in random order. Returns false if none is left.
    bool step() {
        current() = this;
        for (Thread* t : shuffled()) {
            if (t->done) continue;
            running_ = t;
            run(*t);
            left_ -= t->done;
        }
        current() = nullptr;
        return left_ > 0;
    }

    Thread& thread() { return *running_; }
    // Dynamic shared memory begins at a multiple of 128 bytes that is not one of 256: code that
    // flips bits of an address may rely on no larger alignment.
    static constexpr uint32_t kSharedBase = 9 * 128;
    char* shared() {
        const uintptr_t at = reinterpret_cast<uintptr_t>(shared_.data());
        return shared_.data() + (128 - at % 128) % 128;
    }
    // Data at an address of shared memory: `bytes` bytes, aligned to their number.
    char* shared_at(uint32_t address, unsigned bytes) {
        if (address % bytes != 0 || address < kSharedBase ||
            address + bytes > kSharedBase + shared_bytes_) {
            std::fprintf(stderr, "thread %u: %u bytes at %u of shared memory\n", running_->index.x,
                         bytes, address);
            std::abort();
        }
        return shared() + (address - kSharedBase);
    }
    int lane() const { return running_->index.x % 32; }

    void yield() {
        if (_setjmp(running_->resume) == 0) _longjmp(scheduler_, 1);
    }
    void perhaps_yield() {
        if (random_() % 16 == 0) yield();
    }

    void sync_threads() { bar_sync(0, int(threads_.size())); }

    // Barrier `id` among `threads` threads.
    void bar_sync(int id, int threads) {
        const unsigned generation = barriers_[id].generation;
        bar_arrive(id, threads);
        while (barriers_[id].generation == generation) yield();
        perhaps_yield();
    }
    // Waits like bar_sync. Returns true if `own` is true for one of the threads.
    bool bar_red_or(int id, int threads, bool own) {
        barriers_[id].any |= own;
        bar_sync(id, threads);
        return barriers_[id].result;
    }
    void bar_arrive(int id, int threads) {
        Barrier& barrier = barriers_[id];
        if (++barrier.arrived == threads) {
            barrier.arrived = 0;
            barrier.result = barrier.any;
            barrier.any = false;
            ++barrier.generation;
        }
        perhaps_yield();
    }

    // All lanes give words; the last one to arrive computes from them what each lane takes.
    template <int kGiven, int kTaken, typename Make>
    void together(const uint32_t (&given)[kGiven], uint32_t (&taken)[kTaken], const Make& make) {
        perhaps_yield();
        Warp& w = warps_[running_->index.x / 32];
        const int own = lane();
        std::memcpy(w.given[own], given, sizeof(given));
        const unsigned generation = w.generation;
        if (++w.arrived == 32) {
            make(w);
            w.arrived = 0;
            ++w.generation;
        } else {
            while (w.generation == generation) yield();
        }
        std::memcpy(taken, w.taken[own], sizeof(taken));
    }

    Index block_index, grid_dim;

  private:
    static constexpr size_t kStack = 32 << 10;

    static void enter() {
        Block* block = current();
        (*block->kernel_)();
        block->running_->done = true;
        _longjmp(block->scheduler_, 1);
    }

    // Runs the fiber until it yields or is done. swapcontext would set the signal mask, a system
    // call that takes longer than all the rest of a switch.
    void run(Thread& t) {
        if (_setjmp(scheduler_) != 0) return;
        if (t.begun) _longjmp(t.resume, 1);
        t.begun = true;
        setcontext(&t.begin);
    }

    std::vector<Thread*> shuffled() {
        std::vector<Thread*> all;
        for (Thread& t : threads_) all.push_back(&t);
        for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[random_() % i]);
        return all;
    }

    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    size_t shared_bytes_;
    std::vector<char> shared_;
    std::minstd_rand random_;
    jmp_buf scheduler_;
    size_t left_ = 0;
    Thread* running_ = nullptr;
    const std::function<void()>* kernel_ = nullptr;
    struct Barrier {
        int arrived = 0;
        unsigned generation = 0;
        // For the threads that have arrived, and for the previous generation.
        bool any = false, result = false;
    };
    Barrier barriers_[16];
};

// Runs all blocks of a grid in random order: at the same time, or one after another.
template <typename Kernel, typename Params>
void launch(Kernel kernel, unsigned grid, unsigned threads, size_t shared_bytes,
            const Params& params, unsigned seed, bool together = true) {
    std::vector<unsigned> order(grid);
    for (unsigned i = 0; i < grid; ++i) order[i] = i;
    std::minstd_rand random(seed);
    for (unsigned i = grid; i > 1; --i) std::swap(order[i - 1], order[random() % i]);
    const std::function<void()> body = [&] { kernel(params); };
    std::vector<std::unique_ptr<Block>> running;
    for (unsigned i : order) {
        Index block, all;
        block.x = i;
        all.x = grid;
        running.emplace_back(new Block(threads, shared_bytes, seed + i, block, all));
        running.back()->start(body);
        if (!together) {
            while (running.back()->step());
            running.clear();
        }
    }
    while (!running.empty()) {
        const size_t i = random() % running.size();
        if (!running[i]->step()) running.erase(running.begin() + i);
    }
}

}  // namespace mla::emulator
