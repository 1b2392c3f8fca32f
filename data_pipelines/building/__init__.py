"""A data folder built by one rank or many; it goes on after a kill, and appears whole."""

from longstride.data_pipelines.building.build import build, build_dataset
from longstride.data_pipelines.building.crew import Crew, join_crew
from longstride.data_pipelines.building.unfinished import kept_folder

__all__ = ["Crew", "build", "build_dataset", "join_crew", "kept_folder"]
