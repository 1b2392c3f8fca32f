"""enwik8: the first 10^8 bytes of an English Wikipedia dump of 2006, as XML (http://mattmahoney.net/dc/textdata)."""

from longstride.data_pipelines.datasets.byte_corpus import ByteCorpus
from longstride.data_pipelines.datasets.published import Archive, Known

ENWIK8 = ByteCorpus(
    name="enwik8",
    archive=Archive(
        url="http://mattmahoney.net/dc/enwik8.zip",
        size=36_445_475,
        sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    ),
    content=Known(100_000_000, "md5", "a1fa5ffddb56f4953e226637dabbb36a"),  # published beside it
)
