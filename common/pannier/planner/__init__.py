"""Traces, what a step costs, and a simulation of the real scheduler with that clock. Imports no torch, no sockets."""

from pannier.planner.cost import Clock, ModelCost, Rates, Roofline, StepTime, Work, lane_bound, work_of
from pannier.planner.distribution import Distribution
from pannier.planner.ideal import ideal_hit_rate
from pannier.planner.prompts import make_prompt
from pannier.planner.result import SimulationResult
from pannier.planner.setup import Setup
from pannier.planner.simulate import Stalled, simulate
from pannier.planner.trace import FORMATS, HASHED_TOKENS, TraceError, TraceRequest, read_trace
from pannier.planner.workload import at_rate, repeated

__all__ = [
    "FORMATS",
    "HASHED_TOKENS",
    "Clock",
    "Distribution",
    "ModelCost",
    "Rates",
    "Roofline",
    "Setup",
    "SimulationResult",
    "Stalled",
    "StepTime",
    "TraceError",
    "TraceRequest",
    "Work",
    "at_rate",
    "ideal_hit_rate",
    "lane_bound",
    "make_prompt",
    "read_trace",
    "repeated",
    "simulate",
    "work_of",
]
