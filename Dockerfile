# The server. On a CPU:   docker build --build-arg TORCH_INDEX=URL -t spec_compile .
#             On a GPU:   docker build --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 --build-arg EXTRAS=serve,gpu -t spec_compile .
# docker run [--gpus all] -p 8000:8000 -v spec_compile:/data spec_compile MODEL [flags of `python -m spec_compile serve`]
# URL is the index of torch's CPU builds, which PyTorch's install page names; without it pip takes the CUDA build.
ARG BASE=python:3.12-slim

FROM ${BASE} AS base
# g++ also at run time: Inductor compiles a CPU's rounds with it, and Triton starts its kernels by a small C module.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && (command -v python3 || apt-get install -y --no-install-recommends python3) \
    && (python3 -c "import ensurepip, sysconfig, os; os.stat(sysconfig.get_path('include') + '/Python.h')" \
        || apt-get install -y --no-install-recommends python3-venv python3-dev) \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

FROM base AS build
COPY . /source
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /wheels /source

FROM base
ARG EXTRAS=serve
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} "torch>=2.11,<2.16"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]"
RUN useradd --create-home server && install -d -o server /data
USER server
# Models of the Hub and what starts have found out outlive the container.
ENV HF_HOME=/data/huggingface SPEC_COMPILE_CACHE=/data/spec_compile
VOLUME /data
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000/health')"]
ENTRYPOINT ["python", "-m", "spec_compile", "serve", "--host", "0.0.0.0"]
