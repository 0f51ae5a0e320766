"""Rules drawn from public reports about serving robot policies, one test or more for each.

The number in a test's name is the rule's; its docstring names the public report or the source file that the rule comes
from. Most of these reports are about other software: they show what goes wrong in this trade.
"""
