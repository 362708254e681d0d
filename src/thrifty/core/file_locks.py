"""Locks on files that the system frees when their holder ends, where the file system has any."""

import errno
import fcntl

NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""Error numbers by which file systems say that they have none, as some shared ones of clusters do."""


def lock_file(descriptor: int, wait: bool = True) -> bool:
    """Lock an open file for this process alone; whether the file system has locks. Raises BlockingIOError where another
    process has it and this one is not to wait."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True
