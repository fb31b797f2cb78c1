// The AI SDK's providers against a server: whole answers and streams, whose every event they validate.
import { generateText, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const baseURL = process.argv[2].replace(/\/$/, "") + "/v1";
const models = [
  createOpenAI({ baseURL, apiKey: "none" }).responses("tiny"),
  createAnthropic({ baseURL, apiKey: "none" })("tiny"),
  createOpenAICompatible({ name: "local", baseURL, includeUsage: true })("tiny"),
];
const tools = { look: tool({ description: "looks", inputSchema: z.object({ at: z.string() }) }) };
const tell = (answer, errors) =>
  console.log(JSON.stringify({
    text: answer.text, thought: answer.reasoningText ?? "", tokens: answer.usage.outputTokens, errors,
    calls: answer.toolCalls.map((call) => [call.toolName, call.input]),
  }));

for (const model of models) {
  const asked = { model, tools, prompt: "hello", maxOutputTokens: 200, maxRetries: 0 };
  tell(await generateText(asked), []);
  const errors = [];
  const stream = streamText({ ...asked, onError: ({ error }) => errors.push(String(error)) });
  for await (const part of stream.fullStream) if (part.type === "error") errors.push(String(part.error));
  tell({
    text: await stream.text, reasoningText: await stream.reasoningText, usage: await stream.usage,
    toolCalls: await stream.toolCalls,
  }, errors);
}
