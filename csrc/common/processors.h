// What depends on compiler and processor: functions made for several instruction sets, inlining, fetching ahead.

#pragma once

#if defined(__GNUC__)
#define INLINE_MEMBER inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch(address, 1)
#else
#define INLINE_MEMBER inline
#define PREFETCH(address) static_cast<void>(address)
#endif
#define INLINE static INLINE_MEMBER

#if defined(__GNUC__) && defined(__x86_64__)
inline bool is_amd() { return __builtin_cpu_is("amd"); }
#else
inline bool is_amd() { return false; }
#endif

// The compiler makes the function for AVX-512, AVX2 and what the system was built for; which is chosen when it is loaded.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
