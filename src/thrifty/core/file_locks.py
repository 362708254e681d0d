"""File locks that the operating system releases when the locking process ends."""

import errno
import fcntl

NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""Error numbers of file systems without locks, such as some shared file systems of clusters."""


def lock_file(descriptor: int, wait: bool = True) -> bool:
    """Lock an open file for this process. Return False on a file system without locks. Raise BlockingIOError if another
    process holds the lock and `wait` is False."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True
