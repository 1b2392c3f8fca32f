"""Build a data folder, on one rank or many. A killed build can be resumed; the folder only appears when complete."""

from longstride.data_pipelines.building.build import build, build_dataset
from longstride.data_pipelines.building.crew import Crew, join_crew
from longstride.data_pipelines.building.folders import unfinished_folder
