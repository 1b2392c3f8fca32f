"""text8: 10^8 bytes of the same Wikipedia as enwik8, of small letters and spaces alone."""

from longstride.data_pipelines.datasets.byte_corpus import ByteCorpus
from longstride.data_pipelines.datasets.published import Archive, Known

TEXT8 = ByteCorpus(
    name="text8",
    archive=Archive(
        url="http://mattmahoney.net/dc/text8.zip",
        size=31_344_016,
        sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
    ),
    content=Known(100_000_000, "md5", "3bea1919949baf155f99411df5fada7e"),
)
