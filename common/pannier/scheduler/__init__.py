"""Placement of heads, block accounting and the choice of rows. Imports no torch, no sockets, no clock."""

from pannier.scheduler.blocks import BlockPool, Inconsistent
from pannier.scheduler.config import SchedulerConfig
from pannier.scheduler.placement import AttentionOffer, GroupPlan, PlacementError, ShardPlan, form_groups
from pannier.scheduler.scheduler import Scheduler
from pannier.scheduler.sequence import Constraint, Output, Rejected, Request
from pannier.scheduler.step import UNRESOLVED, Step, Unplanned

__all__ = [
    "UNRESOLVED",
    "AttentionOffer",
    "BlockPool",
    "Constraint",
    "GroupPlan",
    "Inconsistent",
    "Output",
    "PlacementError",
    "Rejected",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "ShardPlan",
    "Step",
    "Unplanned",
    "form_groups",
]
