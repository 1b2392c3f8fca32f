"""Builds a data folder, by one rank or many. A killed build goes on later, and the folder appears only when whole."""

from longstride.data_pipelines.building.build import build, build_dataset
from longstride.data_pipelines.building.crew import Crew, join_crew
from longstride.data_pipelines.building.folders import kept_folder
