"""The other commands of the job, as one command's supervisor sees them: who is alive, and how to send to them."""

from __future__ import annotations

from ddpexp.launch.rendezvous.wire import Meeting, Peer
from ddpexp.launch.supervise.messages import PeerMessage, encode


class Peers:
    """All other commands on the leading one; on another one the leading command only."""

    def __init__(self, meeting: Meeting | None) -> None:
        """Take the connections of `meeting`; None where this command runs the job alone."""
        self._meeting = meeting
        self.leads = meeting is None or meeting.leads
        self.all = meeting.peers if meeting is not None else []
        self.living = {peer.index: peer for peer in self.all}
        self.leader: Peer | None = None if self.leads else self.all[0]
        self.said_goodbye = False  # the leading command knows how this one ended, and may exit

    def send(self, message: PeerMessage) -> None:
        """Send to all other commands from the leading one, else to the leading one."""
        if self._meeting is not None:
            self._meeting.send(encode(message))

    def send_to_others(self, message: PeerMessage) -> None:
        """Send to all other commands; does nothing unless this command leads."""
        if self.leads:
            self.send(message)

    def send_to_leader(self, message: PeerMessage) -> None:
        """Send to the leading command; does nothing where this command leads."""
        if not self.leads:
            self.send(message)
