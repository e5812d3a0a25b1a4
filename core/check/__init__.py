"""A checker of plans that shares no algorithm with the planner.

It executes the plan for several batch sizes with symbolic memory, which records for every byte which byte of which
value lies there. At the addresses of its operands, every step must find the values that its node reads in the graph.
The checker uses the semantics of operators (`lathe.core.ops`) and the memory access that kernel specs describe
(`lathe.core.kernels`). Of `lathe.core.plan` it uses only `plan.py` and `liveness.py`, which define the plan's data.

With the environment variable `LATHE_CHECK_PLANS=1`, every plan that is made is checked; the tests set it.
"""
