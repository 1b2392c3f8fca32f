"""Read and verify data folders: the manifest, and shards by their indexes.

``index_tars`` makes a data folder from foreign tars, which are not changed.
"""

from longstride.data_pipelines.shards.indexing import index_tars
from longstride.data_pipelines.shards.manifest import MOST_SAMPLES, DataManifest, ShardRecord, SplitRecord, load_palette
from longstride.data_pipelines.shards.reading import DataFolder, SampleReader, Split
from longstride.data_pipelines.shards.tar_stream import TarStream
from longstride.data_pipelines.shards.verify import Progress, Sample, check_split, sample_documents, verify
