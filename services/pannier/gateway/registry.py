"""Who comes in: hellos are answered with a welcome or with the reason why not, and lost workers come back. No I/O."""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import structlog

from pannier.gateway.fleet import Fleet
from pannier.gateway.sessions import Sessions
from pannier.runtime.errors import NotAccepted
from pannier.wire import messages as m

REFUSALS = 8
Say: TypeAlias = Callable[[bytes, "m.Welcome | m.Refused | m.Heartbeat"], None]
log = structlog.get_logger()


class Registry:
    """Takes what workers say of themselves; `say` answers, `accepted` is told of each worker that is taken in."""

    def __init__(
        self, fleet: Fleet, sessions: Sessions, welcome: m.Welcome, say: Say, accepted: Callable[[m.Hello], None]
    ) -> None:
        self.refused: deque[tuple[str, str]] = deque(maxlen=REFUSALS)
        """The last workers that were turned away, and why."""
        self._fleet = fleet
        self._sessions = sessions
        self._welcome = welcome
        self._say = say
        self._accepted = accepted
        self._returning: dict[str, tuple[bytes, m.Hello]] = {}

    def hello(self, peer: bytes, hello: m.Hello) -> None:
        """A process registers; one that takes a lost one's place has to wait until that is fenced."""
        name = hello.name
        if peer != name.encode():
            self._refuse(peer, f"a worker's socket must bear its name, {name!r}")
            return
        if self._fleet.knows_process(hello):
            self._say(peer, self._welcome)  # it says so until it is welcomed
            return
        if self._fleet.knows(name):
            self._sessions.lost(name, "its process was started again", leaves=True)
        self._returning[name] = (peer, hello)
        self.accept_returning()

    def accept_returning(self) -> None:
        """Take in workers whose former process, if there was one, is fenced."""
        for name, (peer, hello) in list(self._returning.items()):
            if not self._fleet.knows(name):
                del self._returning[name]
                self._accept(peer, hello)

    def heartbeat(self, peer: bytes, beat: m.Heartbeat) -> None:
        """A sign of life; of a worker that isn't known (any more) it is answered with a refusal."""
        name = peer.decode(errors="replace")
        if beat.life != self._welcome.life or not self._fleet.knows(name):
            self._say(peer, m.Refused("the gateway has given this worker up, or was started again; start it anew"))
            return
        self._fleet.seen(name, beat.counters)
        self._sessions.returned(name)
        self._say(peer, m.Heartbeat(self._welcome.life, {}))

    def give_up(self, name: str, reason: str) -> None:
        """End a worker that is alive and of no use; it learns why."""
        self._sessions.lost(name, reason, leaves=True)
        self._refuse(name.encode(), reason)

    def _accept(self, peer: bytes, hello: m.Hello) -> None:
        try:
            self._fleet.accept(hello)
        except NotAccepted as error:
            self._refuse(peer, str(error))
            return
        self._accepted(hello)
        self._say(peer, self._welcome)
        log.info("worker accepted", worker=hello.name, pid=hello.pid)

    def _refuse(self, peer: bytes, reason: str) -> None:
        name = peer.decode(errors="replace")
        log.warning("worker refused", worker=name, reason=reason)
        if (name, reason) not in self.refused:
            self.refused.append((name, reason))
        self._say(peer, m.Refused(reason))
