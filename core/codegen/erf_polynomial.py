"""The polynomial of the error function that generated code for CPUs and GPUs evaluates in float32.

erf(x) = x * p(s) with s = 2 (x / END)^2 - 1, for |x| < END; beyond it the result is 1 or -1. s lies in [-1, 1], so that
powers of s and rounding errors stay small. `COEFFICIENTS` are those of p in powers of s, fitted with the least largest
error.
"""

END = 3.75
COEFFICIENTS = (
    0.37705692648887634, -0.18803009390830994, 0.13926899433135986, -0.11193820089101791, 0.09073632955551147,
    -0.07162350416183472, 0.0536414235830307, -0.03727586939930916, 0.024902338162064552, -0.01680075004696846,
    0.009168803691864014, -0.0029480764642357826, 0.0018647651886567473, -0.002239728346467018, 0.0008832985768094659,
)  # fmt: skip
