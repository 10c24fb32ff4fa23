// Reads and writes of files through io_uring, Linux 5.6 and later, by system calls alone: no liburing.
//
//   any thread                       the ring's thread                          kernel
//   submit ──► queue of transfers ─► blocks, at most `depth` in flight ───────► submission ring ──► disk
//   wait   ◄── ended transfers    ◄─ short ones go on where they stopped ◄───── completion ring ◄──
//
// One thread of the ring's own talks to the kernel, without Python's lock, and sleeps in the kernel between completions. That
// keeps the queue full while Python computes, and no request is lost with a thread of the caller: the kernel cancels what a
// thread has in flight when that thread ends. An eventfd, polled through the ring as well, wakes it for new transfers.
//
// Limits: types and sizes of tensors are checked in Python (megatron_ds/host/async_io.py), which also keeps them alive.

#include <linux/io_uring.h>
#include <poll.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// An errno with a sentence; becomes OSError(errno, sentence).
struct SystemError {
    int code;
    std::string what;
};

std::string reason(int code) {
    if (code == ENOSYS) return "this kernel has no io_uring";
    if (code == EPERM || code == EACCES)
        return "the kernel forbids io_uring here (kernel.io_uring_disabled, or a container's seccomp profile)";
    return std::string("io_uring cannot be set up: ") + std::strerror(code);
}

// ---------------------------------------------------------------------------------------------------------- the kernel's
class Fd {
public:
    explicit Fd(int fd) : fd_(fd) {
        if (fd < 0) throw SystemError{errno, reason(errno)};
    }
    Fd(const Fd&) = delete;
    ~Fd() { close(fd_); }
    operator int() const { return fd_; }

private:
    int fd_;
};

class Mapping {
public:
    Mapping(int fd, size_t nbytes, uint64_t offset)
        : start_(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, off_t(offset))),
          nbytes_(nbytes) {
        if (start_ == MAP_FAILED) throw SystemError{errno, reason(errno)};
        madvise(start_, nbytes, MADV_DONTFORK);
    }
    Mapping(const Mapping&) = delete;
    ~Mapping() { munmap(start_, nbytes_); }

    template <class T>
    T* at(size_t offset) const { return reinterpret_cast<T*>(static_cast<char*>(start_) + offset); }

private:
    void* start_;
    size_t nbytes_;
};

// The two rings shared with the kernel; for one thread. Whoever prepares requests never has more than `entries` under way.
class Rings {
public:
    explicit Rings(unsigned entries)
        : fd_(int(syscall(__NR_io_uring_setup, entries, &params_))), rings_(fd_, bytes(), IORING_OFF_SQ_RING),
          requests_(fd_, params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
        if (!(params_.features & IORING_FEAT_RW_CUR_POS)) throw SystemError{ENOSYS, "the kernel is older than 5.6"};
    }

    // A zeroed request, which goes with the next `enter`.
    io_uring_sqe* prepare() {
        const io_sqring_offsets& at = params_.sq_off;
        unsigned* tail = rings_.at<unsigned>(at.tail);
        const unsigned index = *tail & *rings_.at<unsigned>(at.ring_mask);
        io_uring_sqe* request = requests_.at<io_uring_sqe>(0) + index;
        std::memset(request, 0, sizeof *request);
        rings_.at<unsigned>(at.array)[index] = index;
        __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);      // the kernel reads the request in enter, not before
        ++unsent_;
        return request;
    }

    // Submits, and sleeps until something has completed. Returns 0 or an errno; what was not submitted goes next time.
    int enter() {
        const long sent = syscall(__NR_io_uring_enter, int(fd_), unsent_, 1u, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (sent < 0) return errno;
        unsent_ -= unsigned(sent);
        return 0;
    }

    // Calls act(user_data, result) for each completion.
    template <class Act>
    void reap(const Act& act) {
        const io_cqring_offsets& at = params_.cq_off;
        unsigned* head = rings_.at<unsigned>(at.head);
        const unsigned mask = *rings_.at<unsigned>(at.ring_mask);
        while (*head != __atomic_load_n(rings_.at<unsigned>(at.tail), __ATOMIC_ACQUIRE)) {
            const io_uring_cqe completion = rings_.at<io_uring_cqe>(at.cqes)[*head & mask];
            __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
            act(completion.user_data, completion.res);
        }
    }

private:
    size_t bytes() const {
        return std::max<size_t>(params_.sq_off.array + params_.sq_entries * sizeof(unsigned),
                                params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe));
    }

    io_uring_params params_{};
    Fd fd_;
    Mapping rings_, requests_;
    unsigned unsent_ = 0;
};

// -------------------------------------------------------------------------------------------------------------- transfers
struct Transfer {
    bool write;
    int fd;
    char* address;
    uint64_t nbytes, offset;
    uint64_t issued = 0, moved = 0;
    unsigned in_flight = 0;      // blocks
    int error = 0;               // the first errno

    bool ended() const { return issued == nbytes && in_flight == 0; }
};

struct Block {
    Transfer* transfer;
    uint64_t start, nbytes, moved;      // start: from the transfer's
};

class Engine {
public:
    Engine(unsigned depth, uint64_t block_bytes)
        : block_bytes_(block_bytes), blocks_(depth) {
        rings_.emplace(depth + 1);
        wake_.emplace(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        for (unsigned slot = 0; slot < depth; ++slot) free_.push_back(slot);
        // Python's signal handlers are for its own threads.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            thread_ = std::thread([this] { run(); });
        } catch (const std::system_error& error) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw SystemError{error.code().value(), std::string("no thread for io_uring: ") + error.what()};
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    uint64_t submit(const Transfer& transfer) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) throw std::invalid_argument("the ring is closed");
        const uint64_t ticket = next_ticket_++;
        Transfer& kept = transfers_.emplace(ticket, transfer).first->second;
        if (broken_) {
            kept.error = broken_;
            kept.issued = kept.nbytes;
        }
        if (!kept.ended()) {
            waiting_.push_back(&kept);
            eventfd_write(*wake_, 1);
        }
        return ticket;
    }

    // True with the result, once: (bytes moved, errno or 0). False when it has not ended after the time.
    bool wait(uint64_t ticket, std::chrono::milliseconds time, std::pair<uint64_t, int>* result) {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto ended = [&] {
            const auto found = transfers_.find(ticket);
            if (found == transfers_.end()) throw std::invalid_argument("no such transfer, or it was waited for before");
            return found->second.ended();
        };
        if (!changed_.wait_for(lock, time, ended)) return false;
        const Transfer& transfer = transfers_.at(ticket);
        *result = {transfer.moved, transfer.error};
        transfers_.erase(ticket);
        return true;
    }

    // Waits for all transfers, and gives thread and descriptors back; results can still be waited for.
    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
            if (wake_) eventfd_write(*wake_, 1);
        }
        if (!thread_.joinable()) return;
        thread_.join();
        std::lock_guard<std::mutex> lock(mutex_);
        rings_.reset();
        wake_.reset();
    }

private:
    static constexpr uint64_t WAKE = UINT64_MAX;

    void run() {
        listen();
        for (;;) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
                fill();
                if (broken_ || (closing_ && free_.size() == blocks_.size())) return;
            }
            const int error = rings_->enter();
            if (error == EAGAIN || error == EBUSY) std::this_thread::sleep_for(std::chrono::milliseconds(1));      // no memory
            std::lock_guard<std::mutex> lock(mutex_);
            if (error && error != EAGAIN && error != EBUSY && error != EINTR)
                give_up(error);
            else
                rings_->reap([this](uint64_t slot, int result) {
                    slot == WAKE ? listen() : complete(unsigned(slot), result);
                });
            changed_.notify_all();
        }
    }

    void listen() {
        eventfd_t count;
        eventfd_read(*wake_, &count);      // what comes after this ends the new poll at once
        io_uring_sqe* request = rings_->prepare();
        request->opcode = IORING_OP_POLL_ADD;
        request->fd = *wake_;
        request->poll_events = POLLIN;
        request->user_data = WAKE;
    }

    void fill() {
        while (!waiting_.empty() && !free_.empty()) {
            Transfer& t = *waiting_.front();
            const unsigned slot = free_.back();
            free_.pop_back();
            blocks_[slot] = {&t, t.issued, std::min(block_bytes_, t.nbytes - t.issued), 0};
            t.issued += blocks_[slot].nbytes;
            ++t.in_flight;
            issue(slot);
            if (t.issued == t.nbytes) waiting_.pop_front();
        }
    }

    void issue(unsigned slot) {
        const Block& block = blocks_[slot];
        const Transfer& t = *block.transfer;
        const uint64_t start = block.start + block.moved;
        io_uring_sqe* request = rings_->prepare();
        request->opcode = t.write ? IORING_OP_WRITE : IORING_OP_READ;
        request->fd = t.fd;
        request->addr = reinterpret_cast<uintptr_t>(t.address + start);
        request->len = uint32_t(block.nbytes - block.moved);
        request->off = t.offset + start;
        request->user_data = slot;
    }

    void complete(unsigned slot, int result) {
        Block& block = blocks_[slot];
        Transfer& t = *block.transfer;
        if (result > 0) {
            block.moved += uint64_t(result);
            t.moved += uint64_t(result);
        }
        if ((result > 0 && block.moved < block.nbytes) || result == -EINTR || result == -EAGAIN) return issue(slot);
        if (result <= 0) {
            // After a short direct read the rest is no longer aligned. Short means that the file ends, which is the finding.
            const bool at_end = result == 0 || (result == -EINVAL && !t.write && block.moved > 0);
            if (!at_end && !t.error) t.error = -result;
            t.issued = t.nbytes;
            waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), &t), waiting_.end());
        }
        --t.in_flight;
        free_.push_back(slot);
    }

    // The ring itself fails, which it never should: all transfers end with its error.
    void give_up(int error) {
        broken_ = error;
        waiting_.clear();
        for (auto& [ticket, t] : transfers_) {
            if (t.ended()) continue;
            t.error = error;
            t.issued = t.nbytes;
            t.in_flight = 0;
        }
    }

    const uint64_t block_bytes_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<uint64_t, Transfer> transfers_;      // until they are waited for; addresses stay
    std::deque<Transfer*> waiting_;                         // not yet issued to the end
    std::vector<Block> blocks_;
    std::vector<unsigned> free_;                            // blocks_ that are not in flight
    uint64_t next_ticket_ = 0;
    bool closing_ = false;
    int broken_ = 0;
    std::optional<Rings> rings_;                            // none after close
    std::optional<Fd> wake_;
    std::thread thread_;
};

// ---------------------------------------------------------------------------------------------------------------- binding
// A forked child has a copy of the engine without its thread: it may neither use nor destroy it.
class Ring {
public:
    Ring(unsigned depth, uint64_t block_bytes) : owner_(getpid()) {
        if (depth < 1 || depth > 4096 || block_bytes < 1 || block_bytes > 1u << 30)
            throw std::invalid_argument("depth must be 1 to 4096, block_bytes 1 to 2^30");
        try {
            engine_ = new Engine(depth, block_bytes);
        } catch (const SystemError& error) {
            PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code, error.what).ptr());
            throw py::error_already_set();
        }
    }
    Ring(const Ring&) = delete;
    ~Ring() {
        if (owner_ != getpid()) return;
        close();
        delete engine_;
    }

    uint64_t submit(bool write, int fd, uintptr_t address, uint64_t nbytes, uint64_t offset) {
        check();
        return engine_->submit({write, fd, reinterpret_cast<char*>(address), nbytes, offset});
    }

    std::pair<uint64_t, int> wait(uint64_t ticket) {
        check();
        for (std::pair<uint64_t, int> result;;) {
            {
                py::gil_scoped_release released;
                if (engine_->wait(ticket, std::chrono::milliseconds(200), &result)) return result;
            }
            if (PyErr_CheckSignals()) throw py::error_already_set();
        }
    }

    void close() {
        check();
        py::gil_scoped_release released;
        engine_->close();
    }

private:
    void check() const {
        if (owner_ != getpid()) throw std::invalid_argument("a ring is of no use in a forked child: make one there");
    }

    const pid_t owner_;
    Engine* engine_ = nullptr;
};

}  // namespace

PYBIND11_MODULE(_async_io, module) {
    module.doc() = "Files through io_uring; megatron_ds.host.async_io checks arguments, keeps the memory and is the way in.";
    py::class_<Ring>(module, "Ring", "Up to `depth` blocks of `block_bytes` in flight. OSError where io_uring does not work.")
        .def(py::init<unsigned, uint64_t>(), py::arg("depth"), py::arg("block_bytes"))
        .def("submit", &Ring::submit, py::arg("write"), py::arg("fd"), py::arg("address"), py::arg("nbytes"),
             py::arg("offset"),
             "Start a transfer; returns a ticket. The memory must live until the ticket has been waited for.")
        .def("wait", &Ring::wait, py::arg("ticket"),
             "(bytes moved, errno or 0), once per ticket. Fewer bytes without an error: the file ends there.")
        .def("close", &Ring::close, "Wait for all transfers, end the thread, give the descriptors back.");
}
