"""Whether offloading pays on a set-up, and what decides it."""

from pannier.planner.overlap import Parts, lane_step_bound, paying_transfer


def verdict(parts: Parts, lanes: int, rows: float, offloaded: float, monolithic: float) -> str:
    """One sentence. `rows` of a lane-step; `offloaded` and `monolithic` tokens per second of whole runs."""
    bound, ratio = lane_step_bound(parts, lanes), offloaded / monolithic
    held = f"a lane-step can't take less than {_ms(bound.seconds)}, held by {bound.held_by}"
    if ratio > 1:
        return f"pays: {ratio:.2f} times the tokens/s of monolithic; {held}"
    longest = paying_transfer(parts, lanes, rows / monolithic)
    if longest is None:
        way_out = "no link would make it pay, for compute or attention take longer than all of monolithic"
    elif longest < parts.transfer_s:
        way_out = f"transfer takes {_ms(parts.transfer_s)}, and would have to take less than {_ms(longest)}"
    else:
        way_out = "that would pay: what is lost is neither compute, attention nor transfer"
    return f"doesn't pay: {ratio:.2f} times the tokens/s of monolithic; {held}; {way_out}"


def _ms(seconds: float) -> str:
    return f"{round(seconds * 1e3, 1):g} ms"
