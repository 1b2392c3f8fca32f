# Longstride in a container.
#
# For CPUs:          docker build --tag longstride:cpu .
# For NVIDIA cards:  docker build --tag longstride:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
#
# docker run --rm --volume "$PWD:/work" longstride:cpu plan demo
# docker run --rm --volume "$PWD:/work" --gpus all --shm-size 8g longstride:cuda train --config mine.json
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm
ARG PYTHON
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# Triton compiles its launchers by gcc; DeepSpeed reaches other hosts by pdsh over ssh. CUDA's libraries come with
# torch's own packages, and the driver from the host.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*

# First what rarely changes: torch, from the index that has the build for this device.
COPY locks /tmp/locks
RUN pip install --no-cache-dir --constraint /tmp/locks/python${PYTHON}.txt --index-url ${TORCH_INDEX} torch

COPY . /tmp/longstride
RUN pip install --no-cache-dir --constraint /tmp/locks/python${PYTHON}.txt \
        "/tmp/longstride[remote,audio,formats,serve]" \
    && rm -rf /tmp/longstride /tmp/locks

WORKDIR /work
ENTRYPOINT ["longstride"]
CMD ["--help"]
