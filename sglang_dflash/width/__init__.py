"""Pick each step's block width on the host, from the results of earlier steps."""

from sglang_dflash.width.adaptive import AdaptiveWidth as AdaptiveWidth
from sglang_dflash.width.costs import CostTable as CostTable
from sglang_dflash.width.policy import WidthPolicy as WidthPolicy
