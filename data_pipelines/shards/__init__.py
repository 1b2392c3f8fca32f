"""A data folder, read: its manifest, its shards by their indexes, and whether they are as they were built.

``index_tars`` makes a data folder of tars that others wrote, which stay as they are.
"""

from longstride.data_pipelines.shards.indexing import index_tars
from longstride.data_pipelines.shards.manifest import (
    MOST_SAMPLES,
    DataManifest,
    ShardRecord,
    SplitRecord,
    load_palette,
)
from longstride.data_pipelines.shards.reading import DataFolder, Sample, SampleReader, Split, sample_documents
from longstride.data_pipelines.shards.tar_stream import TarStream
from longstride.data_pipelines.shards.verify import Progress, check_split, verify
