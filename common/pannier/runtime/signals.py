"""Requests to stop, as futures: SIGINT and SIGTERM, the first and the second of them."""

import asyncio
import signal


class StopRequests:
    """The first asks a process to finish, the second to leave at once. Make it inside the running loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[signal.Signals] = loop.create_future()
        self.second: asyncio.Future[signal.Signals] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._arrived, number)

    def _arrived(self, number: signal.Signals) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return
