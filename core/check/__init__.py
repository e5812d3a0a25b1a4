"""A checker of plans that shares no code with the planner.

It executes the plan for several batch sizes with symbolic memory, which records for every byte the element of the value
that lies there. Every step must find the elements that it reads by the graph at the addresses of its operands. The
checker uses the semantics of operators (`lathe.core.ops`) and the memory access that kernel specs describe
(`lathe.core.kernels`). Of `lathe.core.plan` it uses only the data classes in `plan.py` and `liveness.py`.

`LATHE_CHECK_PLANS=1` checks every plan that is made; the tests set it.
"""
