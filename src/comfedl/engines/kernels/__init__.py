"""Everything hand-written for speed, behind one function: ``accelerate``.

Each kernel gives the numbers of the plain code, to rounding, and stays only while it pays: at least 5 % of a round of
one of the benchmark's workloads (docs/performance.md). Nothing outside this package knows what is in it.
"""

from comfedl.engines.kernels.choice import VECTORIZE as VECTORIZE
from comfedl.engines.kernels.choice import Accelerated as Accelerated
from comfedl.engines.kernels.choice import accelerate as accelerate
