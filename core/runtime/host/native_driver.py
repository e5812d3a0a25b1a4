"""The native driver: runs a tape of kernels on the thread pool in one call, without the interpreter lock.

Written as LLVM text because it is control flow and atomics, not vector arithmetic. These functions matter:

    enter(team, context) -> status   look up arrays, bind addresses, run the tape on one thread or the pool, collect the
                                     status
    run(context, tid, threads)       every thread runs the tape; barriers separate stages (steps, when timed)
    work(team, tid, generation)      the loop of a worker: wait for a newer job, run it, count it as done
    stop(team)                       wait for the job in progress, then make every worker return; later runs use only
                                     their callers' threads

A job word packs (participants << 32 | generation), which a worker reads at once. So a worker that does not participate
can never run a job twice, or touch the context of a run that has ended. Waiting is a short bounded spin, then a futex
(on other systems a short sleep): an idle pool uses no CPU, and a descheduled thread does not make the other threads
spin for ever.
"""

from __future__ import annotations

import platform
import sys
from enum import IntEnum

from lathe.core.plan.plan import FIRST_PORT
from lathe.core.runtime.host.memory import ELEMENTS_AT

# How long a waiter spins before it goes to sleep. By the clock: a pause takes 40 cycles on some processors, 140 on
# others. A run that follows another one within this time finds the workers awake.
SPIN_NS = 50_000
_PAUSES_PER_CLOCK_READ = 16  # pauses between two reads of the clock


class PoolWord(IntEnum):
    """64-bit words of the pool's block; each shared word has its own cache line."""

    JOB = 0  # participants << 32 | generation
    CONTEXT = 8
    DONE = 16  # participants that have finished the job
    BUSY = 24
    STOP = 32
    SLEEPERS = 40
    DONE_SLEEPERS = 48
    SIZE = 56


class ContextWord(IntEnum):
    """64-bit words of a run's context."""

    N = 0
    FIRST = 1
    LAST = 2
    FUNCTIONS = 3  # -> address of each step's kernel
    STARTS = 4  # -> index of each step's first operand
    ADDRESSES = 5  # -> operand addresses, filled by `enter`
    COUNTERS = 6  # -> eight words per step
    THREADS = 7
    TIMES = 8  # -> nanoseconds at the start and after each step, or 0
    SLOTS = 9  # -> (base, a, b) per operand
    SLOT_COUNT = 10
    BASES = 11
    BARRIERS = 12  # -> per step, 1 if a barrier follows it
    CLEARED = 13  # 1 if the counters of the steps are zero already
    ARRAYS = 14  # -> NumPy objects whose element addresses become the first bases of ports
    ARRAY_COUNT = 15  # the number of these objects
    ARRIVED = 16
    PHASE = 24
    BARRIER_SLEEPERS = 32
    SIZE = 40


def source() -> str:
    """LLVM text of the driver for this platform, whose functions the module describes."""
    return _DRIVER + _platform_functions(sys.platform, platform.machine())


def _platform_functions(system: str, machine: str) -> str:
    """LLVM text of `sleep_while_equal(word, value)`, `wake_all(word)`, `now()` and `relax()` for a platform.

    `system` is that of `sys.platform`, `machine` that of `platform.machine()`.
    """
    clock = 1 if system == "linux" else 6
    function, arguments = ("x86.sse2.pause", "") if machine in ("x86_64", "AMD64") else ("aarch64.hint", "i32 1")
    futex = {"x86_64": 202, "aarch64": 98}.get(machine) if system == "linux" else None
    wait = _FUTEX.format(number=futex) if futex else _SLEEP
    pause = {"pause": f"call void @llvm.{function}({arguments})", "declared": f"@llvm.{function}({arguments[:3]})"}
    return wait + _CLOCK.format(clock=clock, **pause)


_FUTEX = """
declare i64 @syscall(i64, ...)
define internal void @sleep_while_equal(ptr %word, i32 %value) {{
  %r = call i64 (i64, ...) @syscall(i64 {number}, ptr %word, i32 128, i32 %value, ptr null)
  ret void
}}
define internal void @wake_all(ptr %word) {{
  %r = call i64 (i64, ...) @syscall(i64 {number}, ptr %word, i32 129, i32 2147483647, ptr null)
  ret void
}}
"""

_SLEEP = """
declare i32 @usleep(i32)
define internal void @sleep_while_equal(ptr %word, i32 %value) {
  %r = call i32 @usleep(i32 50)
  ret void
}
define internal void @wake_all(ptr %word) {
  ret void
}
"""

_CLOCK = """
declare i32 @clock_gettime(i32, ptr)
define internal i64 @now() {{
  %t = alloca [2 x i64]
  %r = call i32 @clock_gettime(i32 {clock}, ptr %t)
  %s = load i64, ptr %t
  %p = getelementptr i64, ptr %t, i64 1
  %ns = load i64, ptr %p
  %us = mul i64 %s, 1000000000
  %sum = add i64 %us, %ns
  ret i64 %sum
}}
declare void {declared}
define internal void @relax() alwaysinline {{
  {pause}
  ret void
}}
"""

_DRIVER = f"""
define internal void @wait_change(ptr %word, i32 %seen, ptr %sleepers) {{
entry:
  %v0 = load atomic i32, ptr %word acquire, align 4
  %same0 = icmp eq i32 %v0, %seen
  br i1 %same0, label %begin, label %out
begin:
  %started = call i64 @now()
  br label %spin
spin:
  %i = phi i32 [ 1, %begin ], [ %i1, %again ]
  call void @relax()
  %v = load atomic i32, ptr %word acquire, align 4
  %same = icmp eq i32 %v, %seen
  br i1 %same, label %more, label %out
more:
  %of_look = and i32 %i, {_PAUSES_PER_CLOCK_READ - 1}
  %looks = icmp eq i32 %of_look, 0
  br i1 %looks, label %look, label %again
look:
  %time = call i64 @now()
  %spun = sub i64 %time, %started
  %tired = icmp sge i64 %spun, {SPIN_NS}
  br i1 %tired, label %sleep, label %again
again:
  %i1 = add i32 %i, 1
  br label %spin
sleep:
  %a = atomicrmw add ptr %sleepers, i64 1 seq_cst
  br label %doze
doze:
  %v2 = load atomic i32, ptr %word seq_cst, align 4
  %same2 = icmp eq i32 %v2, %seen
  br i1 %same2, label %down, label %awake
down:
  call void @sleep_while_equal(ptr %word, i32 %seen)
  br label %doze
awake:
  %b = atomicrmw sub ptr %sleepers, i64 1 seq_cst
  br label %out
out:
  ret void
}}

define internal void @barrier(ptr %context, i64 %threads) {{
entry:
  %alone = icmp eq i64 %threads, 1
  br i1 %alone, label %out, label %meet
meet:
  %phase = getelementptr i64, ptr %context, i64 {ContextWord.PHASE}
  %arrived = getelementptr i64, ptr %context, i64 {ContextWord.ARRIVED}
  %sleepers = getelementptr i64, ptr %context, i64 {ContextWord.BARRIER_SLEEPERS}
  %mine = load atomic i32, ptr %phase acquire, align 4
  %before = atomicrmw add ptr %arrived, i64 1 seq_cst
  %count = add i64 %before, 1
  %last = icmp eq i64 %count, %threads
  br i1 %last, label %open, label %wait
open:
  store atomic i64 0, ptr %arrived seq_cst, align 8
  %next = add i32 %mine, 1
  store atomic i32 %next, ptr %phase seq_cst, align 4
  %asleep = load atomic i64, ptr %sleepers seq_cst, align 8
  %any = icmp ne i64 %asleep, 0
  br i1 %any, label %wake, label %out
wake:
  call void @wake_all(ptr %phase)
  br label %out
wait:
  call void @wait_change(ptr %phase, i32 %mine, ptr %sleepers)
  br label %out
out:
  ret void
}}

define internal void @run(ptr %context, i64 %tid, i64 %threads) {{
entry:
  %np = getelementptr i64, ptr %context, i64 {ContextWord.N}
  %n = load i64, ptr %np
  %firstp = getelementptr i64, ptr %context, i64 {ContextWord.FIRST}
  %first = load i64, ptr %firstp
  %lastp = getelementptr i64, ptr %context, i64 {ContextWord.LAST}
  %last = load i64, ptr %lastp
  %fp = getelementptr i64, ptr %context, i64 {ContextWord.FUNCTIONS}
  %functions = load ptr, ptr %fp
  %sp = getelementptr i64, ptr %context, i64 {ContextWord.STARTS}
  %starts = load ptr, ptr %sp
  %ap = getelementptr i64, ptr %context, i64 {ContextWord.ADDRESSES}
  %addresses = load ptr, ptr %ap
  %cp = getelementptr i64, ptr %context, i64 {ContextWord.COUNTERS}
  %counters = load ptr, ptr %cp
  %tp = getelementptr i64, ptr %context, i64 {ContextWord.TIMES}
  %times = load ptr, ptr %tp
  %timed = icmp ne ptr %times, null
  %mp = getelementptr i64, ptr %context, i64 {ContextWord.BARRIERS}
  %marks = load ptr, ptr %mp
  br label %head
head:
  %s = phi i64 [ %first, %entry ], [ %s1, %next ]
  %go = icmp slt i64 %s, %last
  br i1 %go, label %step, label %out
step:
  %fs = getelementptr ptr, ptr %functions, i64 %s
  %f = load ptr, ptr %fs
  %ss = getelementptr i64, ptr %starts, i64 %s
  %start = load i64, ptr %ss
  %operands = getelementptr ptr, ptr %addresses, i64 %start
  %c8 = mul i64 %s, 8
  %counter = getelementptr i64, ptr %counters, i64 %c8
  call void %f(ptr %operands, i64 %n, i64 %tid, i64 %threads, ptr %counter)
  %s1 = add i64 %s, 1
  %inside = icmp slt i64 %s1, %last
  %markp = getelementptr i64, ptr %marks, i64 %s
  %mark = load i64, ptr %markp
  %marked = icmp ne i64 %mark, 0
  %ends = and i1 %inside, %marked
  %meets = or i1 %ends, %timed
  br i1 %meets, label %meet, label %next
meet:
  call void @barrier(ptr %context, i64 %threads)
  %first_thread = icmp eq i64 %tid, 0
  %clock = and i1 %timed, %first_thread
  br i1 %clock, label %stamp, label %next
stamp:
  %t = call i64 @now()
  %slot = getelementptr i64, ptr %times, i64 %s1
  store i64 %t, ptr %slot
  br label %next
next:
  br label %head
out:
  ret void
}}

define internal void @look_up(ptr %context) {{
entry:
  %op = getelementptr i64, ptr %context, i64 {ContextWord.ARRAYS}
  %objects = load ptr, ptr %op
  %kp = getelementptr i64, ptr %context, i64 {ContextWord.ARRAY_COUNT}
  %count = load i64, ptr %kp
  %bp = getelementptr i64, ptr %context, i64 {ContextWord.BASES}
  %bases = load ptr, ptr %bp
  %ports = getelementptr i64, ptr %bases, i64 {FIRST_PORT}
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i1, %body ]
  %go = icmp slt i64 %i, %count
  br i1 %go, label %body, label %out
body:
  %objectp = getelementptr ptr, ptr %objects, i64 %i
  %object = load ptr, ptr %objectp
  %datap = getelementptr i8, ptr %object, i64 {ELEMENTS_AT}
  %data = load i64, ptr %datap
  %to = getelementptr i64, ptr %ports, i64 %i
  store i64 %data, ptr %to
  %i1 = add i64 %i, 1
  br label %head
out:
  ret void
}}

define internal void @bind(ptr %context) {{
entry:
  %np = getelementptr i64, ptr %context, i64 {ContextWord.N}
  %rows = load i64, ptr %np
  %n = call i64 @llvm.smax.i64(i64 %rows, i64 1)
  %sp = getelementptr i64, ptr %context, i64 {ContextWord.SLOTS}
  %slots = load ptr, ptr %sp
  %kp = getelementptr i64, ptr %context, i64 {ContextWord.SLOT_COUNT}
  %count = load i64, ptr %kp
  %bp = getelementptr i64, ptr %context, i64 {ContextWord.BASES}
  %bases = load ptr, ptr %bp
  %ap = getelementptr i64, ptr %context, i64 {ContextWord.ADDRESSES}
  %addresses = load ptr, ptr %ap
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i1, %body ]
  %go = icmp slt i64 %i, %count
  br i1 %go, label %body, label %out
body:
  %i3 = mul i64 %i, 3
  %slot = getelementptr i64, ptr %slots, i64 %i3
  %which = load i64, ptr %slot
  %aslot = getelementptr i64, ptr %slot, i64 1
  %a = load i64, ptr %aslot
  %bslot = getelementptr i64, ptr %slot, i64 2
  %b = load i64, ptr %bslot
  %basep = getelementptr i64, ptr %bases, i64 %which
  %base = load i64, ptr %basep
  %an = mul i64 %a, %n
  %offset = add i64 %an, %b
  %address = add i64 %base, %offset
  %to = getelementptr i64, ptr %addresses, i64 %i
  store i64 %address, ptr %to
  %i1 = add i64 %i, 1
  br label %head
out:
  ret void
}}

define i64 @enter(ptr %team, ptr %context) {{
entry:
  call void @look_up(ptr %context)
  call void @bind(ptr %context)
  %firstp = getelementptr i64, ptr %context, i64 {ContextWord.FIRST}
  %first = load i64, ptr %firstp
  %lastp = getelementptr i64, ptr %context, i64 {ContextWord.LAST}
  %last = load i64, ptr %lastp
  %cp = getelementptr i64, ptr %context, i64 {ContextWord.COUNTERS}
  %counters = load ptr, ptr %cp
  %clearedp = getelementptr i64, ptr %context, i64 {ContextWord.CLEARED}
  %cleared = load i64, ptr %clearedp
  %isclear = icmp ne i64 %cleared, 0
  %count = sub i64 %last, %first
  %uncleared = mul i64 %count, 64
  %bytes = select i1 %isclear, i64 0, i64 %uncleared
  %first8 = mul i64 %first, 8
  %zero = getelementptr i64, ptr %counters, i64 %first8
  call void @llvm.memset.p0.i64(ptr align 8 %zero, i8 0, i64 %bytes, i1 false)
  %tp = getelementptr i64, ptr %context, i64 {ContextWord.TIMES}
  %times = load ptr, ptr %tp
  %timed = icmp ne ptr %times, null
  br i1 %timed, label %stamp, label %choose
stamp:
  %t = call i64 @now()
  %slot = getelementptr i64, ptr %times, i64 %first
  store i64 %t, ptr %slot
  br label %choose
choose:
  %thp = getelementptr i64, ptr %context, i64 {ContextWord.THREADS}
  %threads = load i64, ptr %thp
  %many = icmp sgt i64 %threads, 1
  br i1 %many, label %claim, label %alone
claim:
  %busy = getelementptr i64, ptr %team, i64 {PoolWord.BUSY}
  %swap = cmpxchg ptr %busy, i64 0, i64 1 acquire monotonic
  %mine = extractvalue {{ i64, i1 }} %swap, 1
  br i1 %mine, label %publish, label %alone
alone:
  call void @run(ptr %context, i64 0, i64 1)
  br label %status
publish:
  %arrived = getelementptr i64, ptr %context, i64 {ContextWord.ARRIVED}
  store i64 0, ptr %arrived
  %ctxp = getelementptr i64, ptr %team, i64 {PoolWord.CONTEXT}
  store ptr %context, ptr %ctxp
  %done_sleepers = getelementptr i64, ptr %team, i64 {PoolWord.DONE_SLEEPERS}
  %done = getelementptr i64, ptr %team, i64 {PoolWord.DONE}
  store atomic i64 0, ptr %done monotonic, align 8
  %job = getelementptr i64, ptr %team, i64 {PoolWord.JOB}
  %old = load atomic i64, ptr %job monotonic, align 8
  %gen = trunc i64 %old to i32
  %gen1 = add i32 %gen, 1
  %low = zext i32 %gen1 to i64
  %high = shl i64 %threads, 32
  %word = or i64 %high, %low
  store atomic i64 %word, ptr %job seq_cst, align 8
  %sleepp = getelementptr i64, ptr %team, i64 {PoolWord.SLEEPERS}
  %asleep = load atomic i64, ptr %sleepp seq_cst, align 8
  %any = icmp ne i64 %asleep, 0
  br i1 %any, label %wake, label %lead
wake:
  call void @wake_all(ptr %job)
  br label %lead
lead:
  call void @run(ptr %context, i64 0, i64 %threads)
  %others = sub i64 %threads, 1
  br label %gather
gather:
  %finished = load atomic i64, ptr %done acquire, align 8
  %all = icmp eq i64 %finished, %others
  br i1 %all, label %release, label %linger
linger:
  %finished32 = trunc i64 %finished to i32
  call void @wait_change(ptr %done, i32 %finished32, ptr %done_sleepers)
  br label %gather
release:
  store atomic i64 0, ptr %busy release, align 8
  br label %status
status:
  br label %look
look:
  %s = phi i64 [ %first, %status ], [ %s1, %fine ]
  %go = icmp slt i64 %s, %last
  br i1 %go, label %read, label %good
read:
  %w = mul i64 %s, 8
  %w1 = add i64 %w, 1
  %sw = getelementptr i64, ptr %counters, i64 %w1
  %code = load i64, ptr %sw
  %ok = icmp eq i64 %code, 0
  %s1 = add i64 %s, 1
  br i1 %ok, label %fine, label %bad
fine:
  br label %look
bad:
  %shifted = shl i64 %s1, 8
  %answer = or i64 %shifted, %code
  ret i64 %answer
good:
  ret i64 0
}}

define void @work(ptr %team, i64 %tid, i64 %generation) {{
entry:
  %job = getelementptr i64, ptr %team, i64 {PoolWord.JOB}
  %sleepp = getelementptr i64, ptr %team, i64 {PoolWord.SLEEPERS}
  %stopp = getelementptr i64, ptr %team, i64 {PoolWord.STOP}
  %ctxp = getelementptr i64, ptr %team, i64 {PoolWord.CONTEXT}
  %donep = getelementptr i64, ptr %team, i64 {PoolWord.DONE}
  %doners = getelementptr i64, ptr %team, i64 {PoolWord.DONE_SLEEPERS}
  %born32 = trunc i64 %generation to i32
  br label %idle
idle:
  %seen = phi i32 [ %born32, %entry ], [ %gen, %idle_again ]
  call void @wait_change(ptr %job, i32 %seen, ptr %sleepp)
  %word = load atomic i64, ptr %job acquire, align 8
  %gen = trunc i64 %word to i32
  %high = lshr i64 %word, 32
  %stop = load atomic i64, ptr %stopp acquire, align 8
  %over = icmp ne i64 %stop, 0
  br i1 %over, label %out, label %asked
asked:
  %part = icmp slt i64 %tid, %high
  br i1 %part, label %take, label %idle_again
take:
  %context = load ptr, ptr %ctxp
  call void @run(ptr %context, i64 %tid, i64 %high)
  %d = atomicrmw add ptr %donep, i64 1 seq_cst
  %asleep = load atomic i64, ptr %doners seq_cst, align 8
  %any = icmp ne i64 %asleep, 0
  br i1 %any, label %rouse, label %idle_again
rouse:
  call void @wake_all(ptr %donep)
  br label %idle_again
idle_again:
  br label %idle
out:
  ret void
}}

define void @stop(ptr %team) {{
entry:
  %busy = getelementptr i64, ptr %team, i64 {PoolWord.BUSY}
  br label %claim
claim:
  %swap = cmpxchg ptr %busy, i64 0, i64 1 acquire monotonic
  %mine = extractvalue {{ i64, i1 }} %swap, 1
  br i1 %mine, label %end, label %again
again:
  call void @relax()
  br label %claim
end:
  %stopp = getelementptr i64, ptr %team, i64 {PoolWord.STOP}
  store atomic i64 1, ptr %stopp seq_cst, align 8
  %job = getelementptr i64, ptr %team, i64 {PoolWord.JOB}
  %old = load atomic i64, ptr %job monotonic, align 8
  %gen = trunc i64 %old to i32
  %gen1 = add i32 %gen, 1
  %word = zext i32 %gen1 to i64
  store atomic i64 %word, ptr %job seq_cst, align 8
  call void @wake_all(ptr %job)
  ret void
}}

declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare i64 @llvm.smax.i64(i64, i64)
"""
