"""Running a plan on the CPU: memory, threads, the native driver."""
