"""Where a model converts between element types, what that costs, and what to do about it.

    found = audit(model)                  # any model of transformers that continues a text, as it is
    for fix in found.fixes:
        print(fix.remedy, fix.gain)       # of the time, at most

Nothing here needs a stack that runs.
"""

from pannier.audit.audit import Audit, audit
from pannier.audit.bound import Size
from pannier.audit.device import Device, describe
from pannier.audit.drive import CannotRun, Workload
from pannier.audit.findings import Finding, Fix, Site
from pannier.audit.rules import How
from pannier.audit.verdict import Verdict

__all__ = [
    "Audit",
    "CannotRun",
    "Device",
    "Finding",
    "Fix",
    "How",
    "Site",
    "Size",
    "Verdict",
    "Workload",
    "audit",
    "describe",
]
