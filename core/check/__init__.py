"""A checker of plans that shares no code with the planner.

It takes the graph and the plan, and follows the plan for several batch sizes with symbolic memory, which says of every
byte which element of which value lies there. Every step must find the elements that the graph says it reads, where its
operands say they are. The checker takes from elsewhere what operators mean (`core.ops`) and what the specification of a
kernel says of its memory (`core.kernels.catalog`). Of `core.plan` it knows only the data in `core.plan.plan`.

`LATHE_CHECK_PLANS=1` checks every plan that is made; the tests set it.
"""
