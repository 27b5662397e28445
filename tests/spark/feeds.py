"""Streams that tests control: a folder of Parquet files, each of which becomes one epoch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from millstream.model.arrays import array_from
from millstream.model.types import parse_schema


class Feed:
    """A folder that grows by one file per epoch."""

    def __init__(self, folder: Path, ddl: str) -> None:
        self.folder, self.schema = folder, parse_schema(ddl)
        folder.mkdir(parents=True, exist_ok=True)
        self.count = len(list(folder.glob("*.parquet")))

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(self.schema)
        arrays = [array_from(list(c), f.type) for f, c in zip(self.schema, columns, strict=True)]
        staged = self.folder / f".{self.count}"
        pq.write_table(pa.Table.from_arrays(arrays, schema=self.schema), staged)
        os.utime(staged, (1_700_000_000 + self.count,) * 2)  # Spark reads files in the order of their times
        staged.rename(self.folder / f"{self.count:06d}.parquet")
        self.count += 1

    def stream(self, spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema(from_arrow_schema(self.schema)).option("maxFilesPerTrigger", 1)
        return reader.parquet(str(self.folder))

    def batch(self, spark: SparkSession) -> DataFrame:
        return spark.read.schema(from_arrow_schema(self.schema)).parquet(str(self.folder))
