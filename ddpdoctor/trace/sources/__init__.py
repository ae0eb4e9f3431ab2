"""Where traces lie: a path or a URL goes in, bytes come out.

A local file, a pipe or an object in a store is opened only if reading it comes to an end; it is decompressed piece by
piece, in a thread of its own, and never grows beyond what a trace can have. What is wrong with it is kept as words
for a note. Besides the bytes, only a file's name says something here: of which rank and host the trace may be.
"""

from .ahead import ahead
from .files import open_binary, open_place
from .howfar import listening, tell
from .pieces import GZIP, LFS_POINTER, PIECE_BYTES, ZSTD, Source
from .ranks import MOST_RANKS, host_of_name, rank_of_name
from .remote import content_tag, expand_url, is_url, shown
