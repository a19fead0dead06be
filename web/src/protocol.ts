/** What the server sends, as far as the page reads it; docs/serving.md has all of it. */

export interface Named {
  token_id: number;
  text: string;
}

export type Token = Named &
  (
    | { source: "draft"; position: number }
    | { source: "replacement"; rejected: Named[] }
    | { source: "bonus" | "plain" }
  );

export type Source = Token["source"];

export interface SpeculationMetrics {
  mean_acceptance_length: number;
  draft_acceptance_rate: number;
  acceptance_histogram: number[];
  num_spec_steps: number;
  num_draft_tokens: number;
  num_accepted_draft_tokens: number;
  num_spec_tokens: number;
}

export interface Metrics {
  time_to_first_token_ms: number;
  generation_time_ms: number;
  tokens_per_second?: number;
  speculative_decoding?: SpeculationMetrics;
}

export interface Chunk {
  choices: { finish_reason: string | null; token_sources?: Token[] }[];
  metrics?: Metrics;
  error?: { message: string };
}

export interface Message {
  role: "user" | "assistant";
  content: string;
}

export interface GraphRow {
  phase: string;
  asked: string;
  mode: string;
  rows: number;
  tokens: number;
  ragged: boolean;
  captured: boolean;
  reason: string;
  ms: number | null;
  replays: number;
  eager_runs: number;
}

export interface LoopRow {
  phase: string;
  rows: number;
  launches: number;
  iterations: number;
}

export interface GraphReport {
  cudagraph_mode: string;
  rows: GraphRow[];
  loops: LoopRow[];
}

export interface ServerInfo {
  version: string;
  model: string;
  max_model_len: number;
  num_speculative_tokens: number;
  drafter: string | null;
  settings: { name: string; value: string; reason: string }[];
  graphs: GraphReport;
}
