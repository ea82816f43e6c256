/*
 * A monotonic clock that processes read without a system call.
 *
 * Elsewhere reading the clock takes some twenty nanoseconds; in user-mode Linux it is a system call of ten microseconds
 * and more, which would be most of what a runtime that reads the clock a few times per wake-up costs. With every tick the
 * kernel notes its time and the processor's time stamp counter at the end of the vDSO's page; processes add what the
 * counter has advanced since.
 *
 * There is one processor, so that no process runs while the kernel writes: a reader that was interrupted finds another
 * number in seq and begins again.
 */
struct lab_clock {
	unsigned long seq, tsc, ns;
	/* Nanoseconds per count, times 2^32; 0 while it is not known. */
	unsigned long mult;
};

#define LAB_CLOCK_OFFSET (4096 - sizeof(struct lab_clock))

#ifdef LAB_CLOCK_VDSO

static inline __attribute__((always_inline)) int
lab_clock_read(clockid_t clock, struct __kernel_old_timespec *ts)
{
	const volatile struct lab_clock *now;
	unsigned long here, seq, ns;

	/* The page of this code is the vDSO's only one. */
	asm("lea (%%rip), %0" : "=r" (here));
	now = (void *)((here & ~4095ul) + LAB_CLOCK_OFFSET);
	if (clock != CLOCK_MONOTONIC || !now->mult)
		return 0;
	do {
		seq = now->seq;
		ns = now->ns + (((unsigned __int128)(__builtin_ia32_rdtsc() - now->tsc) * now->mult) >> 32);
	} while (now->seq != seq);
	ts->tv_sec = ns / 1000000000;
	ts->tv_nsec = ns % 1000000000;
	return 1;
}

#else

/* Called with every tick. */
static void lab_clock_write(struct lab_clock *now)
{
	static unsigned long first_tsc, first_ns;
	unsigned long tsc = __builtin_ia32_rdtsc();
	unsigned long ns = ktime_get_ns();

	/* The host took the processor in between: the two do not belong together. */
	if (__builtin_ia32_rdtsc() - tsc > 20000)
		return;
	if (!first_tsc) {
		first_tsc = tsc;
		first_ns = ns;
	}
	/* The longer the time from the first tick, the more exact. */
	if (ns - first_ns < 100 * NSEC_PER_MSEC)
		return;
	now->seq++;
	now->tsc = tsc;
	now->ns = ns;
	now->mult = mul_u64_u64_div_u64(ns - first_ns, 1ul << 32, tsc - first_tsc);
}

#endif
